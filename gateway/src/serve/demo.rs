//! `demo`: simulated engines, and the gateway with a daemon of its own in front of them.

use std::path::PathBuf;

use super::{Failure, log_to_stderr, print, proxy, runtime};
use crate::config::{self, Flags};
use crate::demo::{MODEL, SimulatedEngines};
use crate::router::find_program;

/// The options of `demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Simulated engines
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub engines: u8,
    /// Where callers connect, as IP:PORT
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: String,
    /// The daemon's program, which runs the engines too [default: KVROUTED_BIN, kvrouted beside this program, or
    /// kvrouted in PATH]
    #[arg(long, value_name = "FILE")]
    pub kvrouted: Option<PathBuf>,
    /// The least severe level logged: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log_level: String,
}

/// Runs the demo until SIGTERM or SIGINT.
pub(super) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let program = find_program(args.kvrouted.as_deref()).map_err(|error| Failure::Usage(error.to_string()))?;
    log_to_stderr(&args.log_level);
    runtime()?.block_on(async {
        let engines = SimulatedEngines::start(&program, usize::from(args.engines)).await;
        let engines = engines.map_err(|error| Failure::System(format!("no engine can be simulated: {error}")))?;
        let flags = Flags {
            engines: engines.urls(),
            listen: Some(args.listen.clone()),
            admin: Some(String::new()),
            program: Some(program),
            log_level: Some(args.log_level.clone()),
            ..Flags::default()
        };
        let mut config = config::load(None, &flags)
            .map_err(|problems| Failure::Usage(format!("the demo cannot be configured\n{problems}")))?;
        config.forward.tells_worker = true;
        print(&greeting(args))?;
        let memory = proxy::divide(&mut config)?;
        proxy::run(config, memory, None).await
    })
}

fn greeting(args: &DemoArgs) -> String {
    let (engines, listen) = (args.engines, &args.listen);
    format!(
        "Starting {engines} simulated engines of the model {MODEL:?}, a daemon, and the gateway at http://{listen}\n\
         Ask twice: the second reply names the same worker, and `cached_tokens` is no longer 0.\n\n  \
         curl -i http://{listen}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": {MODEL:?}, \"messages\": [{{\"role\": \"user\", \"content\": \"Why is a shared prefix \
         computed only once?\"}}]}}'\n\nCtrl-C ends all of it.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greetings_body_is_json() {
        let args = DemoArgs { engines: 2, listen: "127.0.0.1:8080".into(), kvrouted: None, log_level: "warn".into() };
        let text = greeting(&args);
        let body = text.split('\'').nth(3).expect("a body");
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["model"], MODEL);
    }
}
