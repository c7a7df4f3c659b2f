//! `kvrouted connect`: makes the plan of the arguments.

use std::path::PathBuf;

use super::exit::{Exit, Failure};
use crate::config::{self, Environment, Flags, LogConfig, Setting};
use crate::connect::{ConnectPlan, Target};

const CONNECT_HELP: &str = "\
Clients on this host then use the socket as they use a daemon's: kvrouted query --socket PATH, or a gateway's socket option
The token is one of the daemon's principals_file: kvrouted serve --example-config, table [remote]
Send SIGHUP after a change of the token file or the CA file.";

/// The model of the space that a configuration needs. Nothing here reads it.
const MODEL: &str = "remote";

/// Listens on a local Unix socket and carries each connection to a daemon on another host, over TLS and with a token.
#[derive(Debug, clap::Args)]
#[command(after_help = CONNECT_HELP)]
pub struct ConnectArgs {
    /// The daemon's remote port: its remote.listen
    #[arg(long, value_name = "HOST:PORT")]
    pub to: String,
    /// The Unix socket for local clients. Its folder must exist
    #[arg(long, value_name = "PATH")]
    pub socket: String,
    /// A file with this host's token. Its mode must keep it from users outside its group
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
    /// The certificates of the authorities that are trusted to certify the daemon, in PEM form
    #[arg(long, value_name = "FILE")]
    pub ca_file: PathBuf,
    /// The name that the daemon's certificate must have [default: the host of --to]
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// Permission bits of the socket [default: 0660]
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,
    /// A user who may use the socket, by number or name; repeat it for more. No other may then
    #[arg(long, value_name = "USER")]
    pub allow_uid: Vec<String>,
    /// A group whose members may also use the socket, by number or name
    #[arg(long, value_name = "GROUP")]
    pub allow_gid: Vec<String>,
    /// Serve Prometheus metrics on this port of the loopback interface; 0 = off [default: 0]
    #[arg(long, value_name = "PORT", allow_negative_numbers = true)]
    pub metrics_port: Option<String>,
    /// What the process gives up once it has started: off, report, on or required [default: off]
    #[arg(long, value_name = "MODE")]
    pub sandbox: Option<String>,
    /// The least severe level logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The format of log lines: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

impl ConnectArgs {
    /// Makes the plan and the log configuration.
    ///
    /// # Errors
    /// Every problem of the flags, with its exit code. Nothing has been bound yet.
    pub fn prepare(&self) -> Result<(ConnectPlan, LogConfig), Failure> {
        let unusable =
            |why: &dyn std::fmt::Display| Failure::new(Exit::Usage, format!("the arguments cannot be used\n{why}"));
        let target = Target::parse(&self.to).map_err(|why| unusable(&format!("--to: {why}")))?;
        // The fields of a daemon's configuration have the same names, bounds and messages.
        let config =
            config::load(None, &Environment::default(), &self.flags()).map_err(|problems| unusable(&problems))?;
        let plan = ConnectPlan {
            server_name: self.server_name.clone().unwrap_or_else(|| target.host().to_owned()),
            target,
            token_file: self.token_file.clone(),
            ca_file: self.ca_file.clone(),
            socket: config.serve.socket,
            socket_mode: config.serve.socket_mode,
            access: config.serve.access,
            sandbox: config.sandbox.mode,
            metrics: config.metrics.address(),
        };
        Ok((plan, config.log))
    }

    fn flags(&self) -> Flags {
        let list = |items: &[String]| (!items.is_empty()).then(|| items.join("+"));
        let settings = [
            ("--socket", "serve", "socket", Some(self.socket.clone())),
            ("--socket-mode", "serve", "socket_mode", self.socket_mode.clone()),
            ("--allow-uid", "serve", "allow_uids", list(&self.allow_uid)),
            ("--allow-gid", "serve", "allow_gids", list(&self.allow_gid)),
            ("--metrics-port", "metrics", "port", self.metrics_port.clone()),
            ("--sandbox", "sandbox", "mode", self.sandbox.clone()),
            ("--log-level", "log", "level", self.log_level.clone()),
            ("--log-format", "log", "format", self.log_format.clone()),
            ("--to", "space", "model", Some(MODEL.to_owned())),
        ];
        let setting = |(flag, section, field, text): (_, _, _, Option<String>)| {
            Some(Setting { flag, section, field, text: text? })
        };
        Flags { settings: settings.into_iter().filter_map(setting).collect(), workers: Vec::new() }
    }
}
