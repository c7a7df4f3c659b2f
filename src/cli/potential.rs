//! `kvrouted query --potential-loads`: what every worker would have to do, in print.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

use super::exit::{Exit, Failure};
use crate::error::{Error, counted};
use crate::route::{PotentialLoad, PotentialLoads};

/// What the daemon said to one question.
pub(super) type Loads = Result<PotentialLoads, Error>;

#[derive(Serialize)]
struct Line {
    matched: &'static str,
    workers: Vec<WorkerLine>,
}

#[derive(Serialize)]
struct WorkerLine {
    worker_id: u64,
    dp_rank: u32,
    active_requests: u64,
    prefill_tokens: u64,
    decode_blocks: u64,
}

#[derive(Serialize)]
struct RefusalLine {
    error: String,
}

fn line(load: &PotentialLoad) -> WorkerLine {
    let PotentialLoad { worker, active_requests, prefill_tokens, decode_blocks } = *load;
    WorkerLine { worker_id: worker.id.0, dp_rank: worker.rank.0, active_requests, prefill_tokens, decode_blocks }
}

/// One answer as a line of JSON, without its end.
///
/// # Errors
/// Those of the serializer.
pub(super) fn json(answer: &Loads) -> Result<String, Failure> {
    let written = match answer {
        Ok(loads) => serde_json::to_string(&Line {
            matched: loads.matched.name(),
            workers: loads.workers.iter().map(line).collect(),
        }),
        Err(error) => serde_json::to_string(&RefusalLine { error: error.to_string() }),
    };
    written.map_err(|error| Failure::new(Exit::Internal, error.to_string()))
}

/// One answer as a table, with the end of its last line.
pub(super) fn text(answer: &Loads, token_count: usize) -> String {
    let loads = match answer {
        Ok(loads) => loads,
        Err(error) => return format!("refused: {error}\n"),
    };
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["worker", "requests now", "prefill tokens with it", "decode blocks with it"]);
    let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
    for load in &loads.workers {
        let worker = Cell::new(load.worker);
        table.add_row([worker, number(load.active_requests), number(load.prefill_tokens), number(load.decode_blocks)]);
    }
    let (tokens, blocks) = (counted(token_count, "token"), counted(loads.request_blocks as usize, "whole block"));
    format!("prompt of {tokens}, {blocks}: {}\n{table}\n", loads.matched.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::ids::Worker;
    use crate::route::MatchStatus;

    #[test]
    fn loads_are_printed_for_people_and_for_scripts() {
        let load =
            PotentialLoad { worker: Worker::new(7, 1), active_requests: 2, prefill_tokens: 300, decode_blocks: 40 };
        let answer = Ok(PotentialLoads { workers: vec![load], ..PotentialLoads::default() });
        let said = text(&answer, 64);
        assert!(said.starts_with("prompt of 64 tokens, 0 whole blocks: matched\n"), "{said}");
        for cell in ["7/1", "300", "40"] {
            assert!(said.contains(cell), "{cell}: {said}");
        }
        let line = "{\"matched\":\"matched\",\"workers\":[{\"worker_id\":7,\"dp_rank\":1,\"active_requests\":2,\
                    \"prefill_tokens\":300,\"decode_blocks\":40}]}";
        assert_eq!(json(&answer).unwrap(), line);
        let unknown = PotentialLoads { matched: MatchStatus::Unmatchable, ..PotentialLoads::default() };
        assert!(text(&Ok(unknown), 1).starts_with("prompt of 1 token, 0 whole blocks: unmatchable"));
        let refused = Err(Error::new(Kind::UnknownSpace, "there is no space 4", "ask hello"));
        assert!(json(&refused).unwrap().starts_with("{\"error\":\""));
        assert!(text(&refused, 1).contains("there is no space 4"));
    }
}
