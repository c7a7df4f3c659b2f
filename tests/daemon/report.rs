//! `kvrouted report`: an archive about a daemon, and about one that does not answer. No byte of a secret or of a prompt is
//! in it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde_json::Value;

use crate::kit::ports::free_port;
use crate::kit::{self, Daemon, folder, replace, run, text, until};

/// The files of an archive by name.
type Files = BTreeMap<String, Vec<u8>>;

/// Writes a report, and reads it; also what the command printed.
#[track_caller]
fn report(output: &Path, arguments: &[&str]) -> (Files, String) {
    let ran = run(&[&["report", "--output", text(output)], arguments].concat());
    assert!(ran.status.success(), "{ran:?}");
    let mode = std::fs::metadata(output).expect("an archive").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(output).expect("an archive")));
    let mut files = Files::new();
    for entry in archive.entries().expect("entries") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a path").to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("its bytes");
        files.insert(name.strip_prefix("kvrouted-report/").expect("in the folder").to_owned(), bytes);
    }
    (files, String::from_utf8(ran.stdout).expect("text"))
}

#[track_caller]
fn said<'a>(files: &'a Files, name: &str) -> &'a str {
    let bytes = files.get(name).unwrap_or_else(|| panic!("no {name} among {:?}", files.keys()));
    std::str::from_utf8(bytes).expect("text")
}

/// Refuses an archive with any of these bytes.
#[track_caller]
fn assert_without(files: &Files, output: &Path, secrets: &[&[u8]]) {
    let whole = std::fs::read(output).expect("an archive");
    for secret in secrets {
        let has = |bytes: &[u8]| bytes.windows(secret.len()).any(|window| window == *secret);
        let found: Vec<&String> = files.iter().filter(|(_, bytes)| has(bytes)).map(|(name, _)| name).collect();
        assert!(found.is_empty() && !has(&whole), "{} is in {found:?}", String::from_utf8_lossy(secret));
    }
}

const ROUTERS_SECRET: &str = "routers-hunter2-routers-hunter2-routers";
const SESSION: &str = "session-of-a-user-hunter2";
const REQUEST: &str = "request-of-a-user-hunter2";
const PROMPT_TEXT: &str = "tell me about my illness hunter2";
/// A token that no count and no port is likely to be.
const TOKEN: u32 = 0x5eed_0b0e;

/// Tables with a secret in each place where a daemon starts with it.
fn tables(folder: &Path) -> String {
    let secret = folder.join("routers.secret");
    std::fs::write(&secret, ROUTERS_SECRET).expect("written");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    format!(
        "# the password was comment-hunter2\n[metrics]\nport = {}\n[routers]\nlisten = \"tcp://127.0.0.1:{}\"\nsecret_file = \"{}\"\n\
         [journal]\ndir = \"{}\" # trailing-hunter2\n[[worker]]\nid = 1\nname = \"hf_workerhunter2\"\n[[worker]]\nid = 2\n",
        free_port(),
        free_port(),
        secret.display(),
        folder.join("journal").display()
    )
}

/// The bytes of four tokens in a row, as the wire has them.
fn tokens_on_the_wire() -> Vec<u8> {
    (0..4).flat_map(|_| TOKEN.to_le_bytes()).collect()
}

fn route(daemon: &Daemon) {
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    for at in 0..20 {
        let (tokens, name) = (vec![TOKEN; 640], format!("{REQUEST}-{at}"));
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        client.route(&RouteRequest { affinity_session: Some(SESSION), ..request }).expect("a decision");
    }
}

#[track_caller]
fn replayed(journal: &[u8], folder: &Path) -> Value {
    let file = folder.join("replayed.kvrj");
    std::fs::write(&file, journal).expect("written");
    let ran = run(&["replay", text(&file), "--json"]);
    assert!(ran.status.success(), "{ran:?}");
    serde_json::from_slice(&ran.stdout).expect("JSON")
}

fn journal_of(files: &Files) -> Vec<&Vec<u8>> {
    files.iter().filter(|(name, _)| name.starts_with("journal/")).map(|(_, bytes)| bytes).collect()
}

/// What stands in no archive, whatever the daemon did.
fn secrets() -> Vec<Vec<u8>> {
    let texts = ["hunter2", ROUTERS_SECRET, SESSION, REQUEST, PROMPT_TEXT];
    let mut secrets: Vec<Vec<u8>> = texts.into_iter().map(|text| text.as_bytes().to_vec()).collect();
    secrets.extend([tokens_on_the_wire(), TOKEN.to_string().into_bytes(), b"5eed0b0e".to_vec()]);
    secrets
}

#[test]
fn a_report_of_a_daemon_has_what_it_says_and_no_byte_of_a_secret_or_a_prompt() {
    let (folder, elsewhere) = (folder(), folder());
    let config = kit::configure(folder.path(), &tables(folder.path()));
    let daemon = Daemon::serve(folder, &["--config", text(&config)]);
    route(&daemon);
    let journal = daemon.folder.path().join("journal");
    until("the decisions are in the journal", || daemon.counter("journal_records") == 20);
    std::fs::write(journal.join("journal-9-notes.kvrj"), PROMPT_TEXT).expect("written");

    let output = elsewhere.path().join("r.tar.gz");
    let (files, printed) = report(&output, &["--config", text(&config)]);
    let secrets = secrets();
    assert_without(&files, &output, &secrets.iter().map(Vec::as_slice).collect::<Vec<_>>());

    let json = |name: &str| -> Value { serde_json::from_str(said(&files, name)).expect("JSON") };
    assert_eq!(json("status.json")["workers"].as_array().expect("workers").len(), 2);
    assert_eq!(
        (&json("workers.json")["workers"][0]["name"], &json("routers.json")[0]["state"]),
        (&"(masked)".into(), &"self".into())
    );
    assert_eq!(json("version.json")["daemon"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(said(&files, "metrics.txt").contains("kvrouted_routes_total 20\n"));
    assert!(!said(&files, "doctor.txt").is_empty() && said(&files, "machine.txt").contains("-- the daemon"));
    let shown = said(&files, "kvrouted.toml");
    assert!(shown.contains("model = \"m\"") && shown.contains("secret_file = ") && !shown.contains('#'), "{shown}");
    let journals = journal_of(&files);
    assert_eq!(journals.len(), 1);
    assert_eq!(replayed(journals[0], elsewhere.path())["equal"], 20);
    let readme = said(&files, "README.txt");
    for part in ["status.json (", "journal/journal-9-notes.kvrj: it is not a journal", "secrets, keys, tokens"] {
        assert!(readme.contains(part), "{part}: {readme}");
    }
    let bytes = std::fs::metadata(&output).expect("an archive").len();
    assert!(printed.contains(&format!("{bytes} bytes")) && printed.contains("left out: "), "{printed}");
}

#[test]
fn a_report_without_a_daemon_has_the_rest_and_says_why() {
    let (folder, elsewhere) = (folder(), folder());
    let config = kit::configure(folder.path(), &tables(folder.path()));
    let mut daemon = Daemon::serve(folder, &["--config", text(&config)]);
    route(&daemon);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    // Behind the records of a file that was closed.
    let journal = std::fs::read_dir(daemon.folder.path().join("journal")).expect("the folder").flatten();
    let file: PathBuf = journal.map(|entry| entry.path()).find(|path| path.extension().is_some()).expect("a file");
    let mut file = File::options().append(true).open(file).expect("a file");
    file.write_all(PROMPT_TEXT.as_bytes()).expect("written");

    let output = elsewhere.path().join("down.tar.gz");
    let (files, _) = report(&output, &["--config", text(&config), "--minutes", "60"]);
    let secrets = secrets();
    assert_without(&files, &output, &secrets.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let readme = said(&files, "README.txt");
    assert!(readme.contains("status.json: the daemon does not answer: "), "{readme}");
    assert!(said(&files, "doctor.txt").contains("socket_unreachable"));
    assert_eq!(replayed(journal_of(&files)[0], elsewhere.path())["decisions"], 20);
    for name in ["kvrouted.toml", "machine.txt", "version.json"] {
        assert!(files.contains_key(name), "{name}");
    }
    for name in ["status.json", "workers.json", "routers.json", "metrics.txt"] {
        assert!(!files.contains_key(name) && readme.contains(name), "{name}");
    }

    // With nothing at all, but for the machine.
    let output = elsewhere.path().join("nothing.tar.gz");
    let (files, _) = report(&output, &["--socket", text(&elsewhere.path().join("none"))]);
    let readme = said(&files, "README.txt");
    assert!(readme.contains("kvrouted.toml: --config names no file") && files.contains_key("machine.txt"), "{readme}");
}

/// A configuration with a secret in every place that no daemon accepts.
const HOSTILE: &str = r#"
token = "root-hunter2"
[serve]
socket = "/nowhere/s"
io = "io-hunter2"
password = "serve-hunter2"
[ingest]
nats_user = "user-hunter2"
[routers]
nats = ["nats://alice:nats-hunter2@n1:4222"]
[vault]
anything = "vault-hunter2"
[[space]]
model = "m"
[[worker]]
id = 1
url = "http://bob:url-hunter2@h:8000"
api_key = "worker-hunter2"
"#;

#[test]
fn a_configuration_with_inline_secrets_shows_none_and_one_that_is_no_toml_is_left_out() {
    let folder = folder();
    let config = folder.path().join("hostile.toml");
    let hunters: [&[u8]; 3] = [b"hunter2", b"alice", b"bob"];
    replace(&config, HOSTILE);
    let output = folder.path().join("hostile.tar.gz");
    let (files, printed) = report(&output, &["--config", text(&config)]);
    assert_without(&files, &output, &hunters);
    assert!(said(&files, "kvrouted.toml").contains("model = \"m\"") && !printed.contains("hunter2"), "{printed}");
    assert!(said(&files, "doctor.txt").contains("config_invalid"));

    replace(&config, "[serve]\nsocket = hunter2\n");
    let output = folder.path().join("broken.tar.gz");
    let (files, _) = report(&output, &["--config", text(&config)]);
    assert_without(&files, &output, &hunters);
    assert!(said(&files, "README.txt").contains("has a syntax error in line 2"));
}

#[test]
fn a_report_replaces_no_file() {
    let folder = folder();
    let output = folder.path().join("mine");
    std::fs::write(&output, "mine").expect("written");
    let ran = run(&["report", "--output", text(&output), "--socket", "/nowhere/s"]);
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.code() == Some(71) && said.contains("not overwritten"), "{said}");
    assert_eq!(std::fs::read_to_string(&output).expect("read"), "mine");
}
