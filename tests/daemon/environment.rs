//! Variables of the environment that set fields over the file: their rule, their errors, and a daemon that reads them.

use kvrouted::config::{self, Config, Environment, Flags, Location, Problems, Setting};
use kvrouted::ids::Worker;
use kvrouted::route::Mode;

use crate::kit::{Daemon, Process, configure, folder, kvrouted, text, until};

const SPACE: &str = "[[space]]\nmodel = \"m\"\n";

fn read(file: &str, variables: &[(&str, &str)]) -> Result<Config, Problems> {
    config::parse_over("test.toml", file, &Environment::of(variables), &Flags::default())
}

fn good(file: &str, variables: &[(&str, &str)]) -> Config {
    read(file, variables).unwrap_or_else(|problems| panic!("{problems}"))
}

#[test]
fn variables_win_over_the_file_and_flags_over_variables() {
    let file = format!("{SPACE}[serve]\ncores = 2\nallow_uids = [\"1\"]\n");
    let variables =
        [("KVROUTED_CONFIG__SERVE__CORES", "3"), ("KVROUTED_CONFIG__SERVE__ALLOW_UIDS", "a+b"), ("KVROUTED_BIN", "x")];
    let config = good(&file, &variables);
    assert_eq!((config.serve.cores, config.serve.access.uids.as_slice()), (3, &["a".to_owned(), "b".to_owned()][..]));
    assert_eq!(config.overrides.len(), 2, "other variables are none of its own");
    let setting = Setting { flag: "--cores", section: "serve", field: "cores", text: "4".into() };
    let flags = Flags { settings: vec![setting], workers: Vec::new() };
    let config = config::parse_over("t", &file, &Environment::of(&variables), &flags).expect("valid");
    assert_eq!(config.serve.cores, 4);
}

#[test]
fn tables_that_repeat_have_a_number_and_the_next_number_makes_one() {
    let file = format!("{SPACE}[[worker]]\nid = 1\n");
    let config = good(
        &file,
        &[
            ("KVROUTED_CONFIG__WORKER__0__WEIGHT", "2"),
            ("KVROUTED_CONFIG__WORKER__1__MODEL", "n"),
            ("KVROUTED_CONFIG__WORKER__1__ID", "7"),
            ("KVROUTED_CONFIG__WORKER__0__MODEL", "m"),
            ("KVROUTED_CONFIG__SPACE__1__MODEL", "n"),
            ("KVROUTED_CONFIG__SPACE__1__POLICY__MODE", "kv"),
        ],
    );
    assert_eq!((config.workers[0].weight, config.workers[1].worker), (2.0, Worker::new(7, 0)));
    assert_eq!((config.policy.spaces[0].mode, config.policy.spaces[1].mode), (Mode::Latency, Mode::Kv));
    // Without a file, too.
    let environment = Environment::of(&[("KVROUTED_CONFIG__SPACE__0__MODEL", "m")]);
    let config = config::load(None, &environment, &Flags::default()).expect("valid");
    assert_eq!(config.spaces[0].model, "m");
}

#[test]
fn the_general_policy_reaches_the_spaces_that_do_not_say_otherwise() {
    let file = "[[space]]\nmodel = \"a\"\n[[space]]\nmodel = \"b\"\n[space.policy]\ntemperature = 3\n";
    let variables = [("KVROUTED_CONFIG__POLICY__TEMPERATURE", "2"), ("KVROUTED_CONFIG__POLICY__MODE", "kv")];
    let spaces = good(file, &variables).policy.spaces;
    assert_eq!((spaces[0].temperature, spaces[1].temperature), (2.0, 3.0));
    assert_eq!((spaces[0].mode, spaces[1].mode), (Mode::Kv, Mode::Kv));
}

#[test]
fn a_missing_field_may_come_from_a_variable() {
    let file = "[[space]]\nblock_size = 16\n";
    assert_eq!(good(file, &[("KVROUTED_CONFIG__SPACE__0__MODEL", "m")]).spaces[0].block_size, 16);
    let problems = read(file, &[]).expect_err("the model is missing");
    assert_eq!((problems.list.len(), problems.list[0].line()), (1, Some(1)), "{problems}");
}

#[test]
fn a_bad_variable_is_named_not_a_line() {
    for (variable, value, path, words) in [
        ("KVROUTED_CONFIG__SERVE__CORES", "many", "serve.cores", "expected an integer, found `many`"),
        ("KVROUTED_CONFIG__SERVE__CORES", "-1", "serve.cores", "0 to 256"),
        ("KVROUTED_CONFIG__SERVE__IO", "urning", "serve.io", "did you mean `uring`?"),
        ("KVROUTED_CONFIG__SERVE__SOCKET", "", "serve.socket", "does not name a file"),
        ("KVROUTED_CONFIG__SERVE__SOKCET", "/x", "", "did you mean `KVROUTED_CONFIG__SERVE__SOCKET`?"),
        ("KVROUTED_CONFIG__serve__socket", "/x", "", "did you mean `KVROUTED_CONFIG__SERVE__SOCKET`?"),
        ("KVROUTED_CONFIG__WORKER__3__ENDPONT", "x", "", "did you mean `KVROUTED_CONFIG__WORKER__3__ENDPOINT`?"),
        ("KVROUTED_CONFIG__WORKER__1__ID", "1", "worker[1].id", "the next has the number 0"),
        ("KVROUTED_CONFIG__WORKER__0__NAME", "n", "worker[0].id", "is missing"),
        ("KVROUTED_CONFIG__SPACE__0__POLICY__SEED", "1", "space[0].policy.seed", "set it in [policy]"),
        ("KVROUTED_CONFIG__ADMIN__SOCKET_MODE", "rw", "admin.socket_mode", "octal"),
    ] {
        let problems = read(SPACE, &[(variable, value)]).expect_err(variable);
        let [problem] = problems.list.as_slice() else { panic!("{variable}: {problems}") };
        assert_eq!((problem.path.as_str(), &problem.location), (path, &Location::Variable(variable.into())));
        let said = problems.to_string();
        assert!(said.starts_with(&format!("{variable}: ")) && said.contains(words), "{said}");
    }
}

#[test]
fn a_daemon_says_what_its_environment_sets_and_reads_it_again() {
    let folder = folder();
    let config = configure(folder.path(), "[policy]\ntemperature = 1.0\n");
    let variable = ("KVROUTED_CONFIG__POLICY__TEMPERATURE", "0.5");
    let process = Process::start_with(folder.path(), "daemon", variable, &["serve", "--config", text(&config)]);
    let daemon = Daemon::served_by(process, folder);
    let logged = |words: &str| daemon.process.log().lines().any(|line| line.contains(words));
    assert!(logged(
        "set by the environment variable=\"KVROUTED_CONFIG__POLICY__TEMPERATURE\" field=\"policy.temperature\" value=\"0.5\""
    ));
    let temperature = || {
        let page = daemon.admin().running_config().expect("the configuration");
        page.fields.into_iter().find(|field| field.name == "temperature").map(|field| field.value)
    };
    assert_eq!(temperature().as_deref(), Some("0.5"));
    daemon.reconfigure("[policy]\ntemperature = 2.0\nqueue_threshold = 1.0\n");
    until("the reload is done", || daemon.counter("config_reloads") == 1);
    assert_eq!(temperature().as_deref(), Some("0.5"), "the environment still wins");
}

#[test]
fn check_says_what_the_environment_sets() {
    let folder = folder();
    let config = configure(folder.path(), "");
    let check = |variable: (&str, &str), arguments: &[&str]| {
        let output = kvrouted(arguments).env(variable.0, variable.1).output().expect("the binary runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).expect("UTF-8"))
    };
    for arguments in [&["config", "check", text(&config)][..], &["serve", "--check", "--config", text(&config)]] {
        let (code, said) = check(("KVROUTED_CONFIG__SERVE__CORES", "3"), arguments);
        let wanted = "ok: 1 space, 0 workers\nKVROUTED_CONFIG__SERVE__CORES sets serve.cores to \"3\"\n";
        assert_eq!((code, said.as_str()), (Some(0), wanted));
        let (code, said) = check(("KVROUTED_CONFIG__SERVE__CORS", "3"), arguments);
        assert_eq!(code, Some(64), "{said}");
        assert!(
            said.contains("KVROUTED_CONFIG__SERVE__CORS: names no field of the configuration; did you mean"),
            "{said}"
        );
    }
}
