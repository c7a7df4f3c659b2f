//! An engine over its real sockets, in this process.

use std::path::PathBuf;

use super::*;
use crate::demo::record::{BatchRecord, EventRecord, read_all};

struct Running {
    _folder: tempfile::TempDir,
    log: PathBuf,
    gateway: UnixStream,
    events: zmq::Socket,
}

/// Starts an engine of 8 blocks, subscribes to it and connects to it.
fn start() -> Running {
    let folder = tempfile::tempdir().unwrap();
    let (link, log) = (folder.path().join("link"), folder.path().join("log"));
    let listener = UnixListener::bind(&link).unwrap();
    let publisher = Publisher::bind(&log).unwrap();
    let events = zmq::Context::new().socket(zmq::SUB).unwrap();
    events.set_rcvtimeo(10_000).unwrap();
    events.connect(&publisher.endpoint().unwrap()).unwrap();
    events.set_subscribe(b"").unwrap();
    std::thread::spawn(move || serve(&listener, publisher, 8).map(drop).unwrap());
    let gateway = UnixStream::connect(&link).unwrap();
    Running { _folder: folder, log, gateway, events }
}

impl Running {
    fn say(&mut self, request: &ToEngine) {
        request.write(&mut self.gateway).unwrap();
    }

    fn hear(&mut self) -> FromEngine {
        FromEngine::read(&mut self.gateway).unwrap().unwrap()
    }

    fn run(&mut self, id: u32, prompt: std::ops::Range<u32>, output: std::ops::Range<u32>) -> u32 {
        self.say(&ToEngine::Submit { id, prompt: prompt.collect(), output: output.collect() });
        let FromEngine::Prefilled { id: prefilled, cached_blocks } = self.hear() else { panic!("no prefill") };
        assert_eq!((prefilled, self.hear()), (id, FromEngine::Done { id }));
        cached_blocks
    }
}

#[test]
fn what_it_publishes_is_what_its_cache_does() {
    let mut engine = start();
    assert_eq!(engine.hear(), FromEngine::Ready);
    engine.say(&ToEngine::Clear);
    assert_eq!(engine.hear(), FromEngine::Cleared { seq: 0 });
    assert_eq!(engine.run(1, 0..50, 50..80), 0, "3 blocks of prompt, 2 of output");
    assert_eq!(engine.run(2, 0..80, 80..81), 5, "the next turn finds both");
    assert_eq!(engine.run(3, 500..564, 0..1), 0, "4 blocks more than the cache has room for 3 of");
    assert_eq!(engine.run(4, 0..80, 80..81), 4, "its last block had to go");
    engine.say(&ToEngine::Finish);
    let FromEngine::Finished { batches } = engine.hear() else { panic!("not finished") };

    let mut log: Vec<BatchRecord> = Vec::new();
    read_all(&engine.log, |batch| log.push(batch)).unwrap();
    assert_eq!((log.len() as u64, log[0].events.as_slice()), (batches, [EventRecord::Cleared].as_slice()));
    let first: Vec<u32> = (0..80).collect();
    let other: Vec<u32> = (500..564).collect();
    let (first, other) = (chain::of_tokens(&first), chain::of_tokens(&other));
    let events: Vec<EventRecord> = log.iter().flat_map(|batch| batch.events.clone()).collect();
    assert_eq!(
        events,
        [
            EventRecord::Cleared,
            EventRecord::Stored(first[..3].to_vec()),
            EventRecord::Stored(vec![first[3]]),
            EventRecord::Stored(vec![first[4]]),
            EventRecord::Removed(vec![first[4]]),
            EventRecord::Stored(other.clone()),
            EventRecord::Removed(vec![other[3]]),
            EventRecord::Stored(vec![first[4]]),
        ]
    );
    for batch in &log {
        let frames = engine.events.recv_multipart(0).unwrap();
        assert_eq!(frames.len(), 3);
        assert_eq!((frames[0].as_slice(), frames[1].as_slice()), (&[][..], &batch.seq.to_be_bytes()[..]));
        assert_eq!(frames[2][0], 0x93);
    }
    assert!(log.windows(2).all(|pair| pair[0].sent_ns <= pair[1].sent_ns));
}
