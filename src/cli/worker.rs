//! `kvrouted worker`: adds, removes, changes and lists the workers of a running daemon.

use std::io::Write as _;
use std::path::PathBuf;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::{admin, status};
use crate::config::socket_default;
use crate::error::counted;
use crate::ids::Worker;
use crate::wire::{StatusPage, WorkerChange, WorkerOp, WorkerStatus};

const FIELDS_HELP: &str = "\
Fields are those of [[worker]] in the configuration, separated by commas or spaces:
  kvrouted worker add id=3,endpoint=tcp://10.0.0.7:5557,ranks=2
  kvrouted worker add id=4 url=http://10.0.0.8:30000
  kvrouted worker set 3/1 draining=true weight=4
Workers and fields set this way are forgotten when the daemon ends.";

/// Changes or lists the workers of a running daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = FIELDS_HELP)]
pub struct WorkerArgs {
    /// The daemon's Unix socket
    #[arg(long, global = true, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, global = true, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub action: WorkerAction,
}

/// The commands about workers.
#[derive(Debug, clap::Subcommand)]
pub enum WorkerAction {
    /// Add a worker, or replace one added before.
    Add {
        /// The worker's fields, as in the configuration
        #[arg(required = true, value_name = "FIELD=VALUE,...")]
        fields: Vec<String>,
    },
    /// Remove a worker that a request added.
    Remove {
        /// The worker: its id for every rank, or id/rank
        #[arg(value_name = "ID[/RANK]", value_parser = worker)]
        worker: Worker,
    },
    /// Set fields of a worker of any source, without interrupting its events.
    Set {
        /// The worker: its id for every rank, or id/rank
        #[arg(value_name = "ID[/RANK]", value_parser = worker)]
        worker: Worker,
        /// draining, weight, taints, loras, name, capacity_blocks, blocks_max, batched_tokens_max, prefill_base_us,
        /// prefill_token_ns, prefill_cached_token_ns, engine_class, engine_preset, device
        #[arg(required = true, value_name = "FIELD=VALUE,...")]
        fields: Vec<String>,
    },
    /// List workers and their sources.
    List {
        /// Print one JSON object instead of a table
        #[arg(long)]
        json: bool,
    },
}

impl WorkerArgs {
    /// Sends the request and prints the result.
    ///
    /// # Errors
    /// A daemon that does not answer or refuses, invalid fields, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let socket = self.admin_socket.as_ref().unwrap_or(&self.socket);
        let (op, worker, fields_text) = match &self.action {
            WorkerAction::List { json } => return list(&admin::connect(socket)?.status_all()?, *json),
            WorkerAction::Add { fields } => (WorkerOp::Add, None, fields.as_slice()),
            WorkerAction::Remove { worker } => (WorkerOp::Remove, Some(*worker), &[][..]),
            WorkerAction::Set { worker, fields } => (WorkerOp::Set, Some(*worker), fields.as_slice()),
        };
        let fields = pairs(fields_text).map_err(|message| Failure::new(Exit::Usage, message))?;
        let workers = admin::connect(socket)?.change_worker(&WorkerChange { op, worker, fields: &fields })?;
        let done = match op {
            WorkerOp::Add => "added",
            WorkerOp::Remove => "removed",
            WorkerOp::Set => "set",
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "ok: {} {done}", counted(workers as usize, "worker"))?;
        stdout.flush()?;
        Ok(Exit::Done)
    }
}

/// Reads `7`, every rank of worker 7, or `7/1`, one rank.
pub(super) fn worker(text: &str) -> Result<Worker, String> {
    let expected = |_| format!("`{text}` is neither ID nor ID/RANK");
    let (id, rank) = match text.split_once('/') {
        Some((id, rank)) => (id, Some(rank.parse().map_err(expected)?)),
        None => (text, None),
    };
    Ok(Worker::of_ranks(id.parse().map_err(expected)?, rank))
}

fn pairs(fields_text: &[String]) -> Result<Vec<(String, String)>, String> {
    let fields = fields_text.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|field| !field.is_empty());
    let pair = |field: &str| match field.split_once('=') {
        Some((name, value)) => Ok((name.trim().to_owned(), value.trim().to_owned())),
        None => Err(format!("`{field}` is not field=value")),
    };
    fields.map(pair).collect()
}

/// The workers and their sources as JSON.
pub(super) fn listed(page: &StatusPage) -> Value {
    let worker = |line: &WorkerStatus| {
        json!({
            "worker_id": line.worker.id.0, "dp_rank": line.worker.rank.0, "name": line.name, "model": line.model,
            "state": line.state.name(), "source": line.source,
        })
    };
    json!({
        "workers": page.workers.iter().map(worker).collect::<Vec<_>>(), "sources": status::sources_json(&page.sources),
    })
}

fn list(page: &StatusPage, json: bool) -> Result<Exit, Failure> {
    let (workers, sources) = (&page.workers, &page.sources);
    let text = if json {
        listed(page).to_string()
    } else {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header(["worker", "name", "model", "state", "source"]);
        for line in workers {
            let worker = line.worker.to_string();
            table.add_row([worker.as_str(), &line.name, &line.model, line.state.name(), &line.source]);
        }
        let mut parts = vec![table.to_string()];
        parts.extend(status::source_lines(sources));
        parts.join("\n")
    };
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_an_id_with_or_without_a_rank() {
        assert_eq!(worker("7"), Ok(Worker::new(7, u32::MAX)));
        assert_eq!(worker("18446744073709551615/3"), Ok(Worker::new(u64::MAX, 3)));
        for bad in ["", "x", "7/", "7/x", "-1", "7/1/2"] {
            assert!(worker(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fields_are_separated_by_commas_or_spaces() {
        let fields_text = ["id=1,endpoint=tcp://h:1".to_owned(), "topic=a=b".to_owned()];
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(pairs(&fields_text), Ok(vec![pair("id", "1"), pair("endpoint", "tcp://h:1"), pair("topic", "a=b")]));
        assert!(pairs(&["weight".to_owned()]).is_err());
    }
}
