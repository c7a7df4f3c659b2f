//! Attackers: this test binary again, as a process that plays a role. The gateway's attacks share this file.
//!
//! A role gets its orders by environment variables and says what it did as lines of JSON: first what it offers, if the
//! victim is to come to it, and at the end what it counted.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::kit::test_of_this_binary;
use crate::trial::Trial;

/// The test that is an attacker.
const TEST: &str = "attacker";
const ROLE: &str = "KVROUTED_ATTACKER";
const AT: &str = "KVROUTED_ATTACKER_AT";
const NUMBER: &str = "KVROUTED_ATTACKER_NUMBER";
const SECONDS: &str = "KVROUTED_ATTACKER_SECONDS";
/// How much longer than its orders say an attacker may take before it counts as hung.
const LATE_MAX: Duration = Duration::from_secs(90);

/// What an attacker does.
pub(crate) type Role = fn(&mut Orders);

/// The orders of one attacker, and what it has done.
pub(crate) struct Orders {
    /// The victim's socket, port or folder.
    pub(crate) at: String,
    /// Which of the attackers of a role it is, from 0: also its seed.
    pub(crate) number: u64,
    lasts: Duration,
    until: Instant,
    counts: BTreeMap<&'static str, u64>,
}

impl Orders {
    /// Whether there is time left.
    pub(crate) fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }

    /// Waits until the time is over, holding what it has.
    pub(crate) fn hold(&self) {
        std::thread::sleep(self.until.saturating_duration_since(Instant::now()));
    }

    /// Reports a number, in sum.
    pub(crate) fn count(&mut self, what: &'static str, number: u64) {
        *self.counts.entry(what).or_default() += number;
    }

    /// Tells the test where this attacker listens, or that it is ready. Its time begins now.
    pub(crate) fn offer(&mut self, what: &Value) {
        say(&json!({"offers": what}));
        self.until = Instant::now() + self.lasts;
    }
}

fn say(line: &Value) {
    let mut out = std::io::stdout().lock();
    // The line of the test harness before it may not have ended.
    out.write_all(format!("\n{line}\n").as_bytes()).and_then(|()| out.flush()).expect("the test reads");
}

/// Plays the role that the environment names. Without one, nothing is done.
pub(crate) fn play(roles: &[(&str, Role)]) {
    let Ok(name) = std::env::var(ROLE) else { return };
    let (_, role) = roles.iter().find(|(of, _)| *of == name).expect("a role of that name");
    let number = |variable| std::env::var(variable).expect("orders").parse::<f64>().expect("a number");
    let lasts = Duration::from_secs_f64(number(SECONDS));
    let mut orders = Orders {
        at: std::env::var(AT).expect("orders"),
        number: number(NUMBER) as u64,
        lasts,
        until: Instant::now() + lasts,
        counts: BTreeMap::new(),
    };
    role(&mut orders);
    say(&json!({"counts": orders.counts}));
}

/// Processes that play one role. Dropping them kills them.
pub(crate) struct Attackers {
    role: &'static str,
    processes: Vec<(Child, Receiver<Value>)>,
    by: Instant,
}

impl Attackers {
    /// Starts this many, each with the same orders but for its number.
    pub(crate) fn start(role: &'static str, count: u64, at: &str, lasts: Duration) -> Self {
        let start = |number: u64| {
            let mut command = test_of_this_binary(TEST);
            command.env(ROLE, role).env(AT, at).env(NUMBER, number.to_string());
            command.env(SECONDS, lasts.as_secs_f64().to_string()).stdout(Stdio::piped());
            let mut process = command.spawn().expect("this binary runs");
            let lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
            let (sender, said) = channel();
            std::thread::spawn(move || {
                let values = lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
                // The test may have ended.
                let _ = values.into_iter().try_for_each(|value: Value| sender.send(value));
            });
            (process, said)
        };
        Self { role, processes: (0..count).map(start).collect(), by: Instant::now() + lasts + LATE_MAX }
    }

    /// Waits until each has offered something.
    pub(crate) fn offers(&self) -> Vec<Value> {
        let offer = |said: &Receiver<Value>| said.recv_timeout(LATE_MAX).expect("an offer")["offers"].clone();
        self.processes.iter().map(|(_, said)| offer(said)).collect()
    }

    /// Kills them wherever they are.
    pub(crate) fn kill(&mut self) {
        for (process, _) in &mut self.processes {
            // It may have ended by itself.
            let _ = process.kill();
            process.wait().expect("a child");
        }
    }

    /// Waits for their ends, and adds what they counted to the report.
    #[track_caller]
    pub(crate) fn end(mut self, trial: &mut Trial) {
        for (process, said) in &mut self.processes {
            let mut counts = Value::Null;
            // The pipe ends with the process.
            while let Ok(value) = said.recv_timeout(self.by.saturating_duration_since(Instant::now())) {
                counts = value["counts"].clone();
            }
            for (what, number) in counts.as_object().into_iter().flatten() {
                trial.count(what, number.as_u64().unwrap_or_default());
            }
            trial.must(counts.is_object(), || format!("an attacker ({}) failed or hung", self.role));
            let _ = process.kill();
        }
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        self.kill();
    }
}
