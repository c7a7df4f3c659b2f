//! What a configuration that is read again changes, and which of it has to wait for a restart.

use super::Config;

/// The names of those fields of a table that differ.
macro_rules! differing {
    ($table:literal, $was:expr, $is:expr, [$($field:ident),+ $(,)?]) => {{
        let (was, is) = ($was, $is);
        [$((was.$field != is.$field).then_some(concat!($table, ".", stringify!($field)))),+].into_iter().flatten()
    }};
}

impl Config {
    /// The fields of `next` that differ and are not taken over while the daemon runs.
    #[must_use]
    pub fn waiting_for_restart(&self, next: &Self) -> Vec<&'static str> {
        let mut fields = self.doors_waiting_for_restart(next);
        fields.extend(differing!("log", &self.log, &next.log, [level, format]));
        fields.extend(differing!(
            "ingest",
            &self.ingest,
            &next.ingest,
            [shards, down_after_ms, silence_ms_max, probe_after_ms, receive_messages_max]
        ));
        fields.extend(differing!(
            "booking",
            &self.booking,
            &next.booking,
            [
                age_s_max,
                session_grace_s,
                track_output_blocks,
                back_off_ms,
                back_off_ms_max,
                reported_load_ms_max,
                prefill_model,
                prefill_base_us,
                prefill_token_ns,
                prefill_cached_token_ns,
            ]
        ));
        fields.extend(differing!("snapshot", &self.snapshot, &next.snapshot, [dir, every_s, keep_s]));
        fields.extend(differing!(
            "journal",
            &self.journal,
            &next.journal,
            [dir, sample, file_bytes_max, files_max, ring_records_max]
        ));
        fields.extend(differing!(
            "policy",
            &self.policy,
            &next.policy,
            [seed, queue_requests_max, affinity_sessions_max]
        ));
        fields.extend(differing!("discovery", &self.discovery, &next.discovery, [path, rescan_ms]));
        fields.extend((self.spaces != next.spaces).then_some("space"));
        fields
    }

    /// Those by which the daemon is reached.
    fn doors_waiting_for_restart(&self, next: &Self) -> Vec<&'static str> {
        let mut fields = Vec::new();
        fields.extend(differing!(
            "serve",
            &self.serve,
            &next.serve,
            [
                socket,
                admin_socket,
                socket_mode,
                frame_timeout_ms,
                io,
                cores,
                pin,
                frame_body_bytes_max,
                spin_us_max,
                unread_ms_max,
                lanes_max,
                lane_ring_bytes_max,
                user_share_percent,
                drain_ms_max,
            ]
        ));
        fields.extend(differing!("admin", &self.admin, &next.admin, [socket_mode]));
        // Without a port nothing of it means anything.
        if (self.http.port, next.http.port) != (0, 0) {
            fields.extend(differing!(
                "http",
                &self.http,
                &next.http,
                [port, listen, administer, hosts, worker_hosts, body_bytes_max, dump_worker_ms_max]
            ));
        }
        fields.extend(differing!("metrics", &self.metrics, &next.metrics, [port, hosts]));
        fields
    }
}

#[cfg(test)]
mod tests {
    use crate::config::example::render;
    use crate::config::field::{Field, Kind, Preset, Section};
    use crate::config::fields;
    use crate::config::{Config, Flags, parse};

    fn read(text: &str) -> Config {
        parse("t", &format!("{text}\n[[space]]\nmodel = \"m\"\n"), &Flags::default()).expect("valid")
    }

    #[test]
    fn what_waits_for_a_restart_is_named() {
        let plain = read("");
        for (text, fields) in [
            ("", &[][..]),
            ("[discovery]\ngrace_ms = 1", &[]),
            ("[[worker]]\nid = 7", &[]),
            ("[serve]\ncores = 3\npin = true", &["serve.cores", "serve.pin"]),
            ("[serve]\nallow_uids = [\"7\"]\n[admin]\nallow_gids = [\"7\"]", &[]),
            ("[http]\nlisten = \"::1\"", &[]),
            ("[http]\nport = 1\nbody_bytes_max = 5000", &["http.port", "http.body_bytes_max"]),
            ("[journal]\nsample = 0.5\nfiles_max = 2", &["journal.sample", "journal.files_max"]),
            ("[shadow]\nshare = 0.5", &[]),
            ("[policy]\ndevice_credit = 0.5", &[]),
            ("[[space]]\nmodel = \"other\"", &["space"]),
        ] {
            assert_eq!(plain.waiting_for_restart(&read(text)), fields, "{text}");
        }
    }

    /// Another value of a field than its preset, as the file says it.
    fn another<T>(field: &Field<T>) -> String {
        let preset = match field.preset {
            // A flag that follows from something else is in its example as it is then.
            Preset::Value(value) | Preset::Absent(value) if matches!(field.kind, Kind::Flag { .. }) => value,
            Preset::Value(value) => value,
            Preset::Required(_) | Preset::Absent(_) => "",
        };
        let value = match &field.kind {
            Kind::Integer { min, max, .. } => {
                // What is larger TOML does not have.
                let max = (*max).min(i64::MAX as u64);
                if *min == 0 || preset == min.to_string() { max } else { *min }.to_string()
            }
            Kind::Number { min, max, .. } => if preset.parse() == Ok(*max) { min } else { max }.to_string(),
            Kind::Flag { .. } => (preset != "true").to_string(),
            Kind::Choice { names, .. } => names.iter().find(|name| **name != preset).unwrap().to_string(),
            Kind::Text { .. } | Kind::List { .. } => "other".to_owned(),
            Kind::Parsed { .. } => match field.name {
                "socket" | "admin_socket" => "/tmp/other",
                "socket_mode" => "0640",
                "listen" => "::1",
                other => panic!("what would another {other} be?"),
            }
            .to_owned(),
        };
        render(field, &value)
    }

    /// Every field that does not say that it is reloaded is named when it differs.
    fn assert_named<T>(section: &Section<T>) {
        for field in section.fields.iter().filter(|field| !section.reloads(field.name)) {
            let table = |lines: &str| match section.name {
                // Where there is no port nothing else of it counts.
                "http" if field.name != "port" => format!("[http]\nport = 1\n{lines}"),
                name => format!("[{name}]\n{lines}"),
            };
            let next = read(&table(&format!("{} = {}", field.name, another(field))));
            let fields = read(&table("")).waiting_for_restart(&next);
            assert!(
                fields.contains(&format!("{}.{}", section.name, field.name).as_str()),
                "{}: {fields:?}",
                field.name
            );
        }
    }

    #[test]
    fn no_field_that_waits_for_a_restart_is_passed_over() {
        assert_named(&fields::SERVE);
        assert_named(&fields::ADMIN);
        assert_named(&fields::METRICS);
        assert_named(&fields::HTTP);
        assert_named(&fields::LOG);
        assert_named(&fields::INGEST);
        assert_named(&fields::BOOKING);
        assert_named(&fields::SNAPSHOT);
        assert_named(&fields::JOURNAL);
        assert_named(&fields::SHADOW);
        assert_named(&fields::POLICY);
        assert_named(&fields::DISCOVERY);
    }

    #[test]
    fn the_marks_of_the_fields_say_the_same() {
        assert!(fields::WORKER.names().all(|name| fields::WORKER.reloads(name)));
        assert!(fields::SHADOW.names().all(|name| fields::SHADOW.reloads(name)));
        assert!(fields::DISCOVERY.reloads("grace_ms") && !fields::DISCOVERY.reloads("path"));
        assert!(fields::POLICY.reloads("mode") && !fields::POLICY.reloads("seed"));
        let allows = |name: &str| matches!(name, "allow_uids" | "allow_gids");
        assert!(fields::SERVE.names().all(|name| fields::SERVE.reloads(name) == allows(name)));
        assert!(fields::ADMIN.names().all(|name| fields::ADMIN.reloads(name) == allows(name)));
        assert!(fields::SPACE.names().all(|name| !fields::SPACE.reloads(name)));
    }
}
