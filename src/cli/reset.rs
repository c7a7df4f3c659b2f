//! `kvrouted reset`: a running daemon forgets what it knows of its workers' blocks.

use std::io::Write as _;
use std::path::PathBuf;

use super::admin;
use super::exit::{Exit, Failure};
use crate::config::socket_default;
use crate::error::counted;
use crate::ids::Worker;
use crate::wire::ResetOrder;

/// Empties workers and removes their snapshots. Their engines go on: what they store from now on is learnt.
#[derive(Debug, clap::Args)]
pub struct ResetArgs {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's administration socket [default: the one its socket names]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Only this worker, and rank 0 if none is said [default: every worker]
    #[arg(long, value_name = "ID/RANK", value_parser = worker)]
    pub worker: Option<Worker>,
    /// Only what devices hold, because the engine's own cache was cleared (vLLM: /reset_prefix_cache, /pause, /sleep;
    /// SGLang: /flush_cache): the engine publishes that with its next step, and until then the worker is `unproven`
    #[arg(long)]
    pub engine_cleared: bool,
}

impl ResetArgs {
    /// Asks and says what was done.
    ///
    /// # Errors
    /// A daemon that does not answer, a worker that is not there, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let order = ResetOrder { worker: self.worker, engine_cleared: self.engine_cleared };
        let done = admin::reset(self.admin_socket.as_ref().unwrap_or(&self.socket), order)?;
        let (workers, snapshots) =
            (counted(done.workers as usize, "worker"), counted(done.snapshots as usize, "snapshot"));
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{workers} emptied, {snapshots} removed")?;
        stdout.flush()?;
        Ok(Exit::Done)
    }
}

fn worker(text: &str) -> Result<Worker, String> {
    let (id, rank) = text.split_once('/').unwrap_or((text, "0"));
    match (id.parse(), rank.parse()) {
        (Ok(id), Ok(rank)) => Ok(Worker::new(id, rank)),
        _ => Err("expected ID or ID/RANK, two numbers".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_its_id_and_perhaps_its_rank() {
        assert_eq!((worker("7"), worker("7/3")), (Ok(Worker::new(7, 0)), Ok(Worker::new(7, 3))));
        assert!(["", "/", "7/", "/3", "7/3/1", "-1", "w7"].iter().all(|text| worker(text).is_err()));
    }
}
