//! The command line.

use std::path::PathBuf;

pub use super::demo::DemoArgs;
use crate::config::{Flags, RawKubernetes};
use crate::epp::EppOptions;

const HELP: &str = "\
Try it without engines:
  kvrouted-gateway demo
With engines:
  kvrouted-gateway --engine http://10.0.0.8:8000 --engine http://10.0.0.9:8000
  curl http://127.0.0.1:8080/v1/models
All fields of the configuration file, with defaults and descriptions: kvrouted-gateway serve --example-config";

/// Sends each request to the vLLM or SGLang server that has most of its prompt cached.
#[derive(Debug, clap::Parser)]
#[command(name = "kvrouted-gateway", version, args_conflicts_with_subcommands = true, after_help = HELP)]
pub struct Cli {
    /// The command; without one, `serve`.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The options of `serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// A command.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// An OpenAI-compatible reverse proxy in front of the engines (the default)
    Serve(ServeArgs),
    /// An endpoint picker for Envoy (ext_proc) and the gateways of Kubernetes' Gateway API that are built on it
    Epp(EppArgs),
    /// Simulated engines, a daemon and the gateway, for a first try without a GPU
    Demo(DemoArgs),
    /// The routers behind a service of Kubernetes, as a file that daemons follow (`[routers] peers_file`)
    Peers(PeersArgs),
}

/// The options of `peers`.
#[derive(Clone, Debug, clap::Args)]
pub struct PeersArgs {
    /// The service whose pods are the routers
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    pub service: String,
    /// The port at which routers hear each other, by its name in the service or by number [default: the service's only
    /// port]
    #[arg(long, value_name = "PORT")]
    pub port: Option<String>,
    /// The file to write; it is replaced by renaming
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The API server, as https://HOST:PORT [default: that of the cluster whose pod this is]
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// A file with a bearer token for the server of --url
    #[arg(long, value_name = "FILE", requires = "url")]
    pub token_file: Option<PathBuf>,
    /// A PEM file with the authorities of that server's certificate [default: the machine's own]
    #[arg(long, value_name = "FILE", requires = "url")]
    pub ca_file: Option<PathBuf>,
    /// The least severe level logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

impl PeersArgs {
    /// The fields of the configuration that the flags set.
    #[must_use]
    pub fn flags(&self) -> Flags {
        let kubernetes = RawKubernetes {
            service: Some(self.service.clone()),
            pool: None,
            ports: self.port.iter().cloned().collect(),
            url: self.url.clone(),
            token_file: self.token_file.clone(),
            ca_file: self.ca_file.clone(),
        };
        Flags { log_level: self.log_level.clone(), kubernetes, ..Flags::default() }
    }
}

/// The options of `epp`.
#[derive(Clone, Debug, clap::Args)]
pub struct EppArgs {
    /// The configuration file of `serve`, of which the engines, the daemon, the objectives, the admin port and
    /// `forward.worker_headers` are used
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where /metrics, /health, /ready and /findings are, as IP:PORT on the loopback interface; "" = nowhere [default:
    /// 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// The picker itself.
    #[command(flatten)]
    pub picker: EppOptions,
    /// Engines and daemon.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl EppArgs {
    /// The fields of the configuration that the flags set.
    #[must_use]
    pub fn flags(&self) -> Flags {
        let CommonArgs { engines, socket, kvrouted, api_key_file, sandbox, log_level, kubernetes } =
            self.common.clone();
        let (admin, program) = (self.admin.clone(), kvrouted);
        let kubernetes = kubernetes.into();
        Flags { engines, listen: None, admin, socket, program, api_key_file, sandbox, log_level, kubernetes }
    }
}

/// The options of all commands: engines and daemon.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonArgs {
    /// An engine, as http(s)://HOST:PORT or ID=URL; repeatable. Engine k has the daemon's worker id k, unless ID names
    /// one
    #[arg(long = "engine", value_name = "URL")]
    pub engines: Vec<String>,
    /// The socket of a daemon that runs already [default: run a daemon, and end it at the end]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The program of the daemon to run [default: KVROUTED_BIN, kvrouted beside this program, or kvrouted in PATH]
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    pub kvrouted: Option<PathBuf>,
    /// A file whose only line is the API key of the engines
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// What the gateway, and the daemon that it runs, give up once they have started: off, report, on or required
    /// [default: off]
    #[arg(long, value_name = "MODE")]
    pub sandbox: Option<String>,
    /// The least severe level logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Engines that are pods.
    #[command(flatten)]
    pub kubernetes: KubernetesArgs,
}

/// The options of engines that are pods of a Kubernetes cluster.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
pub struct KubernetesArgs {
    /// The engines are the ready pods of this service
    #[arg(long, value_name = "[NAMESPACE/]NAME", conflicts_with = "kubernetes_pool")]
    pub kubernetes_service: Option<String>,
    /// The engines are the ready pods of this InferencePool
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    pub kubernetes_pool: Option<String>,
    /// The port of the engines, by its name in the service or by number; one for each data-parallel rank [default: the
    /// service's only port]
    #[arg(long, value_name = "PORT", requires = "kubernetes_service")]
    pub kubernetes_port: Vec<String>,
    /// The API server, as https://HOST:PORT [default: that of the cluster whose pod this is]
    #[arg(long, value_name = "URL")]
    pub kubernetes_url: Option<String>,
    /// A file with a bearer token for the server of --kubernetes-url
    #[arg(long, value_name = "FILE", requires = "kubernetes_url")]
    pub kubernetes_token_file: Option<PathBuf>,
    /// A PEM file with the authorities of that server's certificate [default: the machine's own]
    #[arg(long, value_name = "FILE", requires = "kubernetes_url")]
    pub kubernetes_ca_file: Option<PathBuf>,
}

impl From<KubernetesArgs> for RawKubernetes {
    fn from(args: KubernetesArgs) -> Self {
        Self {
            service: args.kubernetes_service,
            pool: args.kubernetes_pool,
            ports: args.kubernetes_port,
            url: args.kubernetes_url,
            token_file: args.kubernetes_token_file,
            ca_file: args.kubernetes_ca_file,
        }
    }
}

/// The options of `serve`. Flags win over the file.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration and list its problems, without running the gateway
    #[arg(long)]
    pub check: bool,
    /// Print a configuration file with every field, its default and its description
    #[arg(long)]
    pub example_config: bool,
    /// Where callers connect, as IP:PORT [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Where /metrics, /health, /ready and /findings are, as IP:PORT on the loopback interface; "" = nowhere [default:
    /// 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// Engines and daemon.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl ServeArgs {
    /// The fields of the configuration that the flags set.
    #[must_use]
    pub fn flags(&self) -> Flags {
        let CommonArgs { engines, socket, kvrouted, api_key_file, sandbox, log_level, kubernetes } =
            self.common.clone();
        Flags {
            engines,
            listen: self.listen.clone(),
            admin: self.admin.clone(),
            socket,
            program: kvrouted,
            api_key_file,
            sandbox,
            log_level,
            kubernetes: kubernetes.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_picker_has_options_of_its_own_and_the_common_ones() {
        let arguments =
            ["kvrouted-gateway", "epp", "--engine", "http://a:1", "--endpoint", "1=10.0.0.8:1", "--one-endpoint"];
        let Some(Command::Epp(args)) = Cli::parse_from(arguments).command else { panic!("`epp` is a command") };
        assert_eq!(args.flags().engines, ["http://a:1"]);
        assert_eq!((args.picker.endpoints.len(), args.picker.list_length()), (1, 1));
    }

    #[test]
    fn serve_may_be_left_out() {
        let short = Cli::parse_from(["kvrouted-gateway", "--engine", "http://a:1", "--engine", "http://b:1"]);
        assert!(short.command.is_none());
        assert_eq!(short.serve.flags().engines, ["http://a:1", "http://b:1"]);
        let long = Cli::parse_from(["kvrouted-gateway", "serve", "--engine", "http://a:1", "--listen", "127.0.0.1:1"]);
        let Some(Command::Serve(args)) = long.command else { panic!("`serve` is a command") };
        assert_eq!((args.flags().engines.len(), args.flags().listen.as_deref()), (1, Some("127.0.0.1:1")));
    }
}
