//! Reload: the changed fields of a newly read configuration that take effect only after a restart.

use super::Config;
use super::field::{Reload, Section};
use super::fields;

/// The changed fields of a table that take effect only after a restart, as `table.field`.
fn waiting<T>(section: &Section<T>, was: &T, is: &T) -> impl Iterator<Item = &'static str> {
    section.fields.iter().filter_map(move |field| match field.reload {
        Reload::Restart { path, differs } => differs(was, is).then_some(path),
        Reload::Live | Reload::AtStart => None,
    })
}

impl Config {
    /// The changed fields of `next` that take effect only after a restart.
    #[must_use]
    pub fn waiting_for_restart(&self, next: &Self) -> Vec<&'static str> {
        let mut paths = Vec::new();
        paths.extend(waiting(&fields::SERVE, &self.serve, &next.serve));
        paths.extend(waiting(&fields::ADMIN, &self.admin, &next.admin));
        // Without a port the other fields of [http] have no effect.
        if (self.http.port, next.http.port) != (0, 0) {
            paths.extend(waiting(&fields::HTTP, &self.http, &next.http));
        }
        paths.extend(waiting(&fields::REMOTE, &self.remote, &next.remote));
        paths.extend(waiting(&fields::METRICS, &self.metrics, &next.metrics));
        paths.extend(waiting(&fields::LOG, &self.log, &next.log));
        paths.extend(waiting(&fields::PROCESS, &self.process, &next.process));
        paths.extend(waiting(&fields::SANDBOX, &self.sandbox, &next.sandbox));
        paths.extend(waiting(&fields::INGEST, &self.ingest, &next.ingest));
        paths.extend(waiting(&fields::BOOKING, &self.booking, &next.booking));
        paths.extend(waiting(&fields::SNAPSHOT, &self.snapshot, &next.snapshot));
        paths.extend(waiting(&fields::JOURNAL, &self.journal, &next.journal));
        paths.extend(waiting(&fields::TRACES, &self.traces, &next.traces));
        paths.extend(waiting(&fields::POLICY, &self.policy, &next.policy));
        paths.extend(waiting(&fields::DISCOVERY, &self.discovery, &next.discovery));
        paths.extend(waiting(&fields::ROUTERS, &self.routers, &next.routers));
        // Workers name spaces by position, so spaces are compared as a whole. A daemon does not read [relay].
        paths.extend((self.spaces != next.spaces).then_some("space"));
        paths
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
    fn changed_fields_that_need_a_restart_are_named() {
        let plain = read("");
        for (text, fields) in [
            ("", &[][..]),
            ("[discovery]\ngrace_ms = 1", &[]),
            ("[[worker]]\nid = 7", &[]),
            ("[serve]\ncores = 3\npin = true", &["serve.cores", "serve.pin"]),
            ("[serve]\nallow_uids = [\"7\"]\n[admin]\nallow_gids = [\"7\"]", &[]),
            ("[http]\nlisten = \"::1\"", &[]),
            ("[http]\nport = 1\nbody_bytes_max = 5000", &["http.port", "http.body_bytes_max"]),
            ("[traces]\nsample_ratio = 0.5\nqueue_max = 16", &["traces.sample_ratio", "traces.queue_max"]),
            ("[journal]\nsample = 0.5\nfiles_max = 2", &["journal.sample", "journal.files_max"]),
            ("[routers]\nbatch_ms = 4", &["routers.batch_ms"]),
            ("[shadow]\nshare = 0.5", &[]),
            ("[policy]\ndevice_credit = 0.5", &[]),
            ("[[space]]\nmodel = \"other\"", &["space"]),
        ] {
            assert_eq!(plain.waiting_for_restart(&read(text)), fields, "{text}");
        }
    }

    /// A value of a field other than its default, in TOML.
    fn another<T>(field: &Field<T>) -> String {
        let preset = match field.preset {
            // The example of a flag that depends on other fields is the value they give it here.
            Preset::Value(value) | Preset::Absent(value) if matches!(field.kind, Kind::Flag { .. }) => value,
            Preset::Value(value) => value,
            Preset::Required(_) | Preset::Absent(_) => "",
        };
        let value = match &field.kind {
            Kind::Integer { min, max, .. } => {
                // TOML has no larger integers.
                let max = (*max).min(i64::MAX as u64);
                if *min == 0 || preset == min.to_string() { max } else { *min }.to_string()
            }
            Kind::Number { min, max, .. } => if preset.parse() == Ok(*max) { min } else { max }.to_string(),
            Kind::Flag { .. } => (preset != "true").to_string(),
            Kind::Choice { names, .. } => names.iter().find(|name| **name != preset).unwrap().to_string(),
            Kind::List { .. } if field.name == "nats" => "nats://other".to_owned(),
            Kind::Text { .. } | Kind::List { .. } => "other".to_owned(),
            Kind::Parsed { what, .. } if what.contains("a TCP port") => "[::1]:7443".to_owned(),
            Kind::Parsed { .. } => match field.name {
                "socket" | "admin_socket" => "/tmp/other",
                "socket_mode" => "0640",
                "endpoint" => "http://other:1/v1/traces",
                "peers_dns" => "other:1",
                "nats_prefix" => "other",
                "listen" if preset.is_empty() => "tcp://*:1",
                "listen" => "::1",
                other => panic!("the test needs another value of {other}"),
            }
            .to_owned(),
        };
        render(field, &value)
    }

    /// Changes each field that needs a restart, and expects its name.
    fn assert_named<T>(section: &Section<T>) {
        // A build without NATS refuses its fields.
        let is_built = |name: &str| cfg!(feature = "nats") || !name.starts_with("nats");
        for field in section.fields.iter().filter(|field| !field.is_live() && is_built(field.name)) {
            let table = |lines: &str| match section.name {
                // Without a port the other fields have no effect.
                "http" if field.name != "port" => format!("[http]\nport = 1\n{lines}"),
                // The other fields are refused without these.
                "routers" if field.name.starts_with("nats") => {
                    let servers = if lines.starts_with("nats =") { "" } else { "nats = [\"nats://a\"]\n" };
                    let password = if field.name == "nats_user" { "nats_secret_file = \"p\"\n" } else { "" };
                    format!("[routers]\nsecret_file = \"s\"\n{servers}{password}{lines}")
                }
                "ingest" if field.name == "nats_user" => format!("[ingest]\nnats_secret_file = \"p\"\n{lines}"),
                "routers" => {
                    let preset = [("listen", "tcp://*:2"), ("secret_file", "s")].into_iter();
                    let missing = preset.filter(|(name, _)| !lines.starts_with(name));
                    let missing: String = missing.map(|(name, value)| format!("{name} = \"{value}\"\n")).collect();
                    format!("[routers]\n{missing}{lines}")
                }
                "remote" if field.name == "listen" => {
                    format!("[remote]\ncertificate_file = \"c\"\nkey_file = \"k\"\nprincipals_file = \"p\"\n{lines}")
                }
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
    fn no_field_that_needs_a_restart_is_missed() {
        assert_named(&fields::SERVE);
        assert_named(&fields::ADMIN);
        assert_named(&fields::METRICS);
        assert_named(&fields::HTTP);
        assert_named(&fields::REMOTE);
        assert_named(&fields::LOG);
        assert_named(&fields::PROCESS);
        assert_named(&fields::INGEST);
        assert_named(&fields::SANDBOX);
        assert_named(&fields::BOOKING);
        assert_named(&fields::SNAPSHOT);
        assert_named(&fields::JOURNAL);
        assert_named(&fields::SHADOW);
        assert_named(&fields::TRACES);
        assert_named(&fields::POLICY);
        assert_named(&fields::DISCOVERY);
        assert_named(&fields::ROUTERS);
    }

    #[test]
    fn a_running_daemon_takes_over_workers_policies_and_access() {
        fn live<T>(section: &Section<T>) -> Vec<&'static str> {
            section.fields.iter().filter(|field| field.is_live()).map(|field| field.name).collect()
        }
        assert_eq!(live(&fields::WORKER).len(), fields::WORKER.fields.len());
        assert_eq!(live(&fields::SHADOW).len(), fields::SHADOW.fields.len());
        assert_eq!(live(&fields::POLICY).len(), fields::POLICY.fields.len() - 3);
        assert_eq!(live(&fields::DISCOVERY), ["grace_ms"]);
        assert_eq!(live(&fields::ROUTERS), ["peers"]);
        assert_eq!(live(&fields::SERVE), ["allow_uids", "allow_gids"]);
        assert_eq!(live(&fields::ADMIN), ["allow_uids", "allow_gids"]);
        assert!(live(&fields::SPACE).is_empty());
    }
}
