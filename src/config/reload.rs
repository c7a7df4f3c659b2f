//! What a configuration that is read again changes, and which of it has to wait for a restart.

use super::Config;

impl Config {
    /// The fields of `next` that differ and are not taken over while the daemon runs.
    #[must_use]
    pub fn waiting_for_restart(&self, next: &Self) -> Vec<&'static str> {
        let mut fields = Vec::new();
        let mut compare = |name, differs| {
            if differs {
                fields.push(name);
            }
        };
        let (was, is) = (&self.serve, &next.serve);
        compare("serve.socket", was.socket != is.socket);
        compare("serve.admin_socket", was.admin_socket != is.admin_socket);
        compare("serve.socket_mode", was.socket_mode != is.socket_mode);
        compare("serve.frame_timeout_ms", was.frame_timeout_ms != is.frame_timeout_ms);
        compare("admin.socket_mode", self.admin.socket_mode != next.admin.socket_mode);
        compare("serve.io", was.io != is.io);
        compare("serve.cores", was.cores != is.cores);
        compare("serve.pin", was.pin != is.pin);
        compare("serve.frame_body_bytes_max", was.frame_body_bytes_max != is.frame_body_bytes_max);
        compare("serve.drain_ms_max", was.drain_ms_max != is.drain_ms_max);
        // Without a port nothing of it means anything.
        compare("http", (self.http.port, next.http.port) != (0, 0) && self.http != next.http);
        compare("metrics.port", self.metrics.port != next.metrics.port);
        compare("log.level", self.log.level != next.log.level);
        compare("log.format", self.log.format != next.log.format);
        let (was, is) = (&self.ingest, &next.ingest);
        compare("ingest.shards", was.shards != is.shards);
        compare("ingest.down_after_ms", was.down_after_ms != is.down_after_ms);
        compare("ingest.silence_ms_max", was.silence_ms_max != is.silence_ms_max);
        compare("ingest.receive_messages_max", was.receive_messages_max != is.receive_messages_max);
        compare("journal", self.journal != next.journal);
        compare("shadow", self.shadow != next.shadow);
        compare("booking", self.booking != next.booking);
        compare("policy.seed", self.policy.seed != next.policy.seed);
        let (was, is) = (self.policy.queue_requests_max, next.policy.queue_requests_max);
        compare("policy.queue_requests_max", was != is);
        let (was, is) = (self.policy.affinity_sessions_max, next.policy.affinity_sessions_max);
        compare("policy.affinity_sessions_max", was != is);
        compare("discovery.path", self.discovery.path != next.discovery.path);
        compare("discovery.rescan_ms", self.discovery.rescan_ms != next.discovery.rescan_ms);
        compare("space", self.spaces != next.spaces);
        fields
    }
}

#[cfg(test)]
mod tests {
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
            ("[admin]\nsocket_mode = \"0660\"", &["admin.socket_mode"]),
            ("[http]\nlisten = \"::1\"", &[]),
            ("[http]\nport = 1", &["http"]),
            ("[log]\nlevel = \"debug\"", &["log.level"]),
            ("[policy]\ndevice_credit = 0.5", &[]),
            ("[policy]\nseed = 4", &["policy.seed"]),
            ("[ingest]\nshards = 2", &["ingest.shards"]),
            ("[[space]]\nmodel = \"other\"", &["space"]),
        ] {
            assert_eq!(plain.waiting_for_restart(&read(text)), fields, "{text}");
        }
    }

    #[test]
    fn the_marks_of_the_fields_say_the_same() {
        assert!(fields::WORKER.names().all(|name| fields::WORKER.reloads(name)));
        assert!(fields::DISCOVERY.reloads("grace_ms") && !fields::DISCOVERY.reloads("path"));
        assert!(fields::POLICY.reloads("mode") && !fields::POLICY.reloads("seed"));
        let allows = |name: &str| matches!(name, "allow_uids" | "allow_gids");
        assert!(fields::SERVE.names().all(|name| fields::SERVE.reloads(name) == allows(name)));
        assert!(fields::ADMIN.names().all(|name| fields::ADMIN.reloads(name) == allows(name)));
        assert!(fields::SPACE.names().all(|name| !fields::SPACE.reloads(name)));
    }
}
