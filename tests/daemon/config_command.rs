//! `kvrouted config`: explanations, the difference to a running daemon, and the schema.

use std::path::Path;

use kvrouted::config::{self, Flags, TableInfo, ValueType};
use serde_json::{Value, json};

use crate::kit::{Daemon, Process, configure, folder, run, text, until};

fn said(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = run(arguments);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

// ---- explain ----

#[test]
fn explain_says_all_that_the_field_table_has() {
    for (field, lines) in [
        (
            "serve.socket",
            &[
                "The Unix socket to which gateways connect.",
                "values     a path of at most 107 bytes",
                "default    \"/run/kvrouted/kvrouted.sock\"",
                "reload     no: a change takes effect at the next start",
                "variable   KVROUTED_CONFIG__SERVE__SOCKET",
                "[serve]",
                "socket = \"/run/kvrouted/kvrouted.sock\"",
            ][..],
        ),
        (
            "policy.near_cost_s",
            &[
                "values     0 to 3600",
                "unit       seconds",
                "reload     yes: SIGHUP takes a change over",
                "one space  near_cost_s in [space.policy], KVROUTED_CONFIG__SPACE__0__POLICY__NEAR_COST_S",
            ],
        ),
        ("worker.id", &["default    none: it must be set", "variable   KVROUTED_CONFIG__WORKER__0__ID", "[[worker]]"]),
        ("space.policy.mode", &["default    what [policy] says", "KVROUTED_CONFIG__SPACE__0__POLICY__MODE"]),
        ("relay.endpoint", &["reload     no: a relay reads it when it starts"]),
        ("http", &["[http]", "  port  ", "  body_bytes_max"]),
    ] {
        let (code, out, err) = said(&["config", "explain", field]);
        assert_eq!(code, Some(0), "{err}");
        for line in lines {
            assert!(out.contains(line.trim_end()), "{field}: {line}: {out}");
        }
    }
}

#[test]
fn every_field_can_be_explained() {
    for (table, field) in config::tables().iter().flat_map(|table| table.fields.iter().map(move |field| (table, field)))
    {
        let path = format!("{}.{}", table.name, field.name);
        assert_eq!(config::field_at(&path), Some((table, field)), "{path}");
    }
    let rows: usize = config::tables().iter().map(|table| table.fields.len()).sum();
    assert_eq!(rows, config::example().lines().filter(|line| line.contains("Values: ")).count());
}

#[test]
fn an_unknown_field_brings_up_similar_ones() {
    for (field, words) in [
        ("serve.sokcet", "did you mean serve.socket"),
        ("temperature", "did you mean policy.temperature"),
        ("qqqqqqqqqqqqqq", "the tables are serve, admin"),
    ] {
        let (code, out, err) = said(&["config", "explain", field]);
        assert_eq!((code, out.as_str()), (Some(64), ""), "{err}");
        assert!(err.contains(words), "{err}");
    }
}

// ---- diff ----

/// `config diff` of a file against a daemon.
fn diff(daemon: &Daemon, file: &Path, more: &[&str]) -> (Option<i32>, String) {
    let socket = daemon.socket();
    let (code, out, err) = said(&[&["config", "diff", text(file), "--socket", text(&socket)], more].concat());
    assert!(err.is_empty(), "{err}");
    (code, out)
}

/// Another file than the daemon's, with these tables.
fn other(daemon: &Daemon, tables: &str) -> std::path::PathBuf {
    let text = std::fs::read_to_string(daemon.folder.path().join("kvrouted.toml")).expect("the daemon's file");
    let space = text.find("[[space]]").expect("a space");
    let path = daemon.folder.path().join("other.toml");
    let head = &text[..space];
    std::fs::write(&path, format!("{head}[[space]]\nmodel = \"m\"\nblock_size = 16\n{tables}")).expect("written");
    path
}

#[test]
fn diff_shows_what_a_reload_would_change_and_a_reload_changes_it() {
    let daemon = Daemon::configured("[policy]\ntemperature = 1.0\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    let file = daemon.folder.path().join("kvrouted.toml");
    assert_eq!(diff(&daemon, &file, &[]), (Some(0), "no difference\n".to_owned()));

    let tables =
        "[policy]\ntemperature = 0.5\nqueue_requests_max = 9\n[[worker]]\nid = 2\nweight = 3.0\n[[worker]]\nid = 3\n";
    let next = other(&daemon, tables);
    let (code, out) = diff(&daemon, &next, &[]);
    let wanted = "policy.temperature: 1.0 -> 0.5\npolicy.queue_requests_max: 4096 -> 9 (needs a restart)\n\
                  worker 3/0: added\nworker 1/0: removed\nworker 2/0: weight: 8.0 -> 3.0\n\
                  differing fields: 2, of which need a restart: 1; workers added: 1, removed: 1, changed: 1\n";
    assert_eq!((code, out.as_str()), (Some(1), wanted));
    let (code, out) = diff(&daemon, &next, &["--json"]);
    let value: Value = serde_json::from_str(&out).expect("JSON");
    let field = json!({"field": "policy.temperature", "running": "1.0", "file": "0.5", "needs_restart": false});
    assert_eq!((code, &value["fields"][0], &value["workers"]["added"][0]), (Some(1), &field, &json!("3/0")));

    daemon.reconfigure(tables);
    until("the reload is done", || daemon.counter("config_reloads") == 1);
    let (code, out) = diff(&daemon, &next, &[]);
    let left = "policy.queue_requests_max: 4096 -> 9 (needs a restart)\n\
                differing fields: 1, of which need a restart: 1; workers added: 0, removed: 0, changed: 0\n";
    assert_eq!((code, out.as_str()), (Some(1), left), "what is left needs a restart");
}

#[test]
fn diff_applies_the_daemons_own_environment_and_options() {
    let folder = folder();
    let config = configure(folder.path(), "");
    let variable = ("KVROUTED_CONFIG__BOOKING__AGE_S_MAX", "77");
    let arguments = ["serve", "--config", text(&config), "--cores", "1"];
    let daemon = Daemon::served_by(Process::start_with(folder.path(), "daemon", variable, &arguments), folder);
    let next = other(&daemon, "[booking]\nage_s_max = 5\n[policy]\ntemperature = 0.5\n");
    let (code, out) = diff(&daemon, &next, &[]);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.starts_with("policy.temperature: 0.0 -> 0.5\ndiffering fields: 1"), "{out}");
    assert!(out.contains("booking.age_s_max (KVROUTED_CONFIG__BOOKING__AGE_S_MAX), serve.cores (--cores)"), "{out}");
}

#[test]
fn diff_says_that_other_spaces_are_refused_and_what_an_order_changed() {
    let daemon = Daemon::configured("[shadow]\nshare = 1.0\npolicy = [\"temperature=0.25\"]\n");
    let file = daemon.folder.path().join("kvrouted.toml");
    let (code, out) = diff(&daemon, &other(&daemon, "salts = \"none\"\n"), &[]);
    assert_eq!(code, Some(1));
    assert!(out.contains("space[0].salts: \"possible\" -> \"none\" (needs a restart)"), "{out}");
    assert!(out.contains("the daemon refuses a reload of this file"), "{out}");
    daemon.admin().set_policy(&kvrouted::wire::PolicyOrder::Promote).expect("promoted");
    let (code, out) = diff(&daemon, &file, &[]);
    assert_eq!(code, Some(1));
    assert!(out.starts_with("policy.temperature: 0.25 -> 0.0\n"), "a reload takes the promotion back: {out}");
}

#[test]
fn diff_tells_failures_from_differences() {
    let folder = folder();
    let config = configure(folder.path(), "");
    let socket = folder.path().join("none");
    let (code, _, err) = said(&["config", "diff", text(&config), "--socket", text(&socket)]);
    assert_eq!(code, Some(69), "{err}");
    let daemon = Daemon::serve(folder, &["--config", text(&config)]);
    let bad = other(&daemon, "[serv]\n");
    let (code, _, err) = said(&["config", "diff", text(&bad), "--socket", text(&daemon.socket())]);
    assert_eq!(code, Some(64), "{err}");
    assert!(err.contains("serv: unknown table; did you mean `serve`?"), "{err}");
    let missing = daemon.folder.path().join("missing.toml");
    let (code, _, err) = said(&["config", "diff", text(&missing), "--socket", text(&daemon.socket())]);
    assert_eq!(code, Some(64), "{err}");
}

#[test]
fn the_contents_of_secret_files_are_not_told() {
    let folder = folder();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef0123456789abcdef-in-the-file").expect("written");
    let config = configure(
        folder.path(),
        &format!(
            "[routers]\nlisten = \"ipc://{}/r\"\nsecret_file = \"{}\"\n",
            folder.path().display(),
            secret.display()
        ),
    );
    let daemon = Daemon::serve(folder, &["--config", text(&config)]);
    let page = format!("{:?}", daemon.admin().running_config().expect("the configuration"));
    assert!(page.contains("secret_file") && !page.contains("in-the-file"), "{page}");
}

// ---- schema ----

/// Why a value does not fit a schema, as one that knows only these keywords says; `None` = it fits.
fn misfit(schema: &Value, value: &Value) -> Option<String> {
    const NOTES: [&str; 5] = ["$schema", "title", "description", "default", "examples"];
    let schema = schema.as_object().expect("a schema is an object");
    for (keyword, wanted) in schema.iter().filter(|(keyword, _)| !NOTES.contains(&keyword.as_str())) {
        let number = || wanted.as_f64().expect("a number");
        let characters = || value.as_str().map(|text| text.chars().count() as f64);
        let fits = match keyword.as_str() {
            "type" => match wanted.as_str().expect("a type") {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "boolean" => value.is_boolean(),
                "number" => value.is_number(),
                "integer" => value.is_i64() || value.is_u64(),
                other => panic!("the type {other}"),
            },
            "minimum" => value.as_f64().is_none_or(|value| value >= number()),
            "maximum" => value.as_f64().is_none_or(|value| value <= number()),
            "minLength" => characters().is_none_or(|count| count >= number()),
            "maxLength" => characters().is_none_or(|count| count <= number()),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as f64 <= number()),
            "pattern" => {
                assert_eq!(wanted, "^[0-9]{1,20}$", "the only pattern");
                let digits = |text: &str| (1..=20).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
                value.as_str().is_none_or(digits)
            }
            "enum" => wanted.as_array().expect("choices").contains(value),
            "anyOf" => wanted.as_array().expect("schemas").iter().any(|schema| misfit(schema, value).is_none()),
            "items" => value.as_array().is_none_or(|items| items.iter().all(|item| misfit(wanted, item).is_none())),
            "required" => {
                wanted.as_array().expect("names").iter().all(|name| {
                    value.as_object().is_none_or(|object| object.contains_key(name.as_str().expect("a name")))
                })
            }
            "properties" => {
                let known = wanted.as_object().expect("schemas");
                let fields = value.as_object().into_iter().flatten();
                let misfits = fields.filter_map(|(name, field)| Some((name, misfit(known.get(name)?, field)?)));
                if let Some((name, why)) = misfits.into_iter().next() {
                    return Some(format!("{name}: {why}"));
                }
                true
            }
            "additionalProperties" => {
                assert_eq!(wanted, false, "no table has fields that are not listed");
                let known = schema["properties"].as_object().expect("schemas");
                value.as_object().is_none_or(|object| object.keys().all(|name| known.contains_key(name)))
            }
            other => panic!("this test does not know the keyword {other}"),
        };
        if !fits {
            return Some(format!("{keyword} {wanted}"));
        }
    }
    None
}

/// A document of TOML as JSON.
fn as_json(text: &str) -> Value {
    let document: toml_edit::DocumentMut = text.parse().expect("TOML");
    object(document.as_table())
}

fn object(table: &dyn toml_edit::TableLike) -> Value {
    table.iter().map(|(name, item)| (name.to_owned(), of_item(item))).collect::<serde_json::Map<_, _>>().into()
}

fn of_item(item: &toml_edit::Item) -> Value {
    match item {
        toml_edit::Item::Table(table) => object(table),
        toml_edit::Item::ArrayOfTables(tables) => tables.iter().map(|table| object(table)).collect(),
        toml_edit::Item::Value(value) => of_value(value),
        toml_edit::Item::None => Value::Null,
    }
}

fn of_value(value: &toml_edit::Value) -> Value {
    match value {
        toml_edit::Value::String(text) => text.value().as_str().into(),
        toml_edit::Value::Integer(value) => (*value.value()).into(),
        toml_edit::Value::Float(value) => (*value.value()).into(),
        toml_edit::Value::Boolean(value) => (*value.value()).into(),
        toml_edit::Value::Array(values) => values.iter().map(of_value).collect(),
        toml_edit::Value::InlineTable(table) => object(table),
        toml_edit::Value::Datetime(date) => date.to_string().into(),
    }
}

#[test]
fn the_example_fits_the_schema_with_and_without_its_comments() {
    let (code, out, err) = said(&["config", "schema"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let schema: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(schema, config::schema());
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    let example = config::example();
    assert_eq!(misfit(&schema, &as_json(&example)), None);
    let is_field = |line: &str| {
        line.strip_prefix("# ").is_some_and(|rest| {
            rest.split_once(" = ").is_some_and(|(name, _)| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        })
    };
    let full: String = example
        .lines()
        .map(|line| if is_field(line) { format!("{}\n", &line[2..]) } else { format!("{line}\n") })
        .collect();
    assert!(full.matches("\nadmin_socket = ").count() == 1, "comments with a field are fields now");
    assert_eq!(misfit(&schema, &as_json(&full)), None);
}

/// The schema of a field, and the document that sets it.
fn of_field<'a>(schema: &'a Value, table: &TableInfo, field: &str) -> &'a Value {
    let table_schema = &schema["properties"][table.name];
    let table_schema = if table.is_repeated { &table_schema["items"] } else { table_schema };
    &table_schema["properties"][field]
}

/// Values at the bounds of a type, which fit, and beyond them, which do not.
fn probes(values: ValueType) -> (Vec<Value>, Vec<Value>) {
    let long = |count: usize| Value::from("x".repeat(count));
    match values {
        ValueType::Integer { min, max } => {
            let most = max.min(i64::MAX as u64);
            let mut bad = vec![json!(0.5), json!(true)];
            bad.extend(min.checked_sub(1).map(Value::from));
            bad.extend((max < i64::MAX as u64).then(|| json!(max + 1)));
            bad.push(if max > i64::MAX as u64 { json!("x") } else { json!("1") });
            (vec![json!(min), json!(most)], bad)
        }
        ValueType::Number { min, max } => {
            let mut bad = vec![json!(min - 1.0), json!("1"), json!(true)];
            bad.extend(max.map(|max| json!(max + 1.0)));
            (vec![json!(min), json!(max.unwrap_or(1e9))], bad)
        }
        ValueType::Flag => (vec![json!(true), json!(false)], vec![json!("true"), json!(1)]),
        ValueType::Choice(names) => {
            (names.iter().map(|name| json!(name)).collect(), vec![json!("no such choice"), json!(1)])
        }
        ValueType::Text { bytes_min, bytes_max } => {
            let mut bad = vec![long(bytes_max + 1), json!(1)];
            bad.extend(bytes_min.checked_sub(1).map(long));
            (vec![long(bytes_min), long(bytes_max)], bad)
        }
        ValueType::List { bytes_max, .. } => {
            (vec![json!([])], vec![json!("x"), json!([1]), json!([""]), json!([long(bytes_max + 1)])])
        }
        ValueType::Parsed(_) => (Vec::new(), vec![json!(1), json!([])]),
    }
}

/// What the daemon's reader says of a field with this value; other fields are of no interest.
fn is_accepted(table: &TableInfo, field: &str, value: &Value) -> bool {
    let (open, close, at) = if table.is_repeated { ("[[", "]]", "[0]") } else { ("[", "]", "") };
    // Of such values, JSON and TOML have one notation.
    let text = format!("{open}{}{close}\n{field} = {value}\n", table.name);
    let path = format!("{}{at}.{field}", table.name);
    let kind = ["expected ", "out of range", "none of", "must not be empty", "are allowed", "an entry must have"];
    match config::parse("t", &text, &Flags::default()) {
        Ok(_) => true,
        Err(problems) => {
            let mut of_kind = problems.list.iter().filter(|problem| problem.path == path);
            !of_kind.any(|problem| {
                kind.iter().any(|words| problem.message.starts_with(words) || problem.message.contains(words))
            })
        }
    }
}

#[test]
fn every_field_is_in_the_schema_and_both_refuse_the_same_values() {
    let schema = config::schema();
    for table in config::tables() {
        for field in &table.fields {
            let of = of_field(&schema, table, field.name);
            let path = format!("{}.{}", table.name, field.name);
            assert!(
                of["description"].as_str().is_some_and(|text| text.contains("Variable: KVROUTED_CONFIG__")),
                "{path}"
            );
            assert!(of.get("default").is_some() != of.get("examples").is_some(), "{path}");
            let shown = of.get("default").unwrap_or_else(|| &of["examples"][0]);
            assert_eq!(misfit(of, shown), None, "{path}: {shown}");
            let (good, bad) = probes(field.values);
            for value in &good {
                assert_eq!(misfit(of, value), None, "{path} = {value}");
                assert!(is_accepted(table, field.name, value), "{path} = {value}");
            }
            for value in &bad {
                assert!(misfit(of, value).is_some(), "{path} = {value}");
                assert!(!is_accepted(table, field.name, value), "{path} = {value}");
            }
        }
    }
}

#[test]
fn faults_of_a_document_do_not_fit_the_schema() {
    let schema = config::schema();
    let fits = |text: &str| misfit(&schema, &as_json(text));
    for good in [
        "[[space]]\nmodel = \"m\"\n[space.policy]\nmode = \"kv\"\n[policy]\nseed = \"18446744073709551615\"\n",
        "serve.cores = 2\nspace = [{ model = \"m\" }]\n",
        "",
    ] {
        assert_eq!(fits(good), None, "{good}");
    }
    for bad in [
        "[serv]\n",
        "[serve]\nsokcet = \"/x\"\n",
        "[serve]\ncores = \"2\"\n",
        "[serve]\ncores = 257\n",
        "[space]\nmodel = \"m\"\n",
        "[[space]]\nblock_size = 16\n",
        "[[space]]\nmodel = \"m\"\n[space.policy]\nseed = 1\n",
        "[[worker]]\nname = \"x\"\n",
        "[policy]\nmode = \"kvv\"\n",
        "[[log]]\nlevel = \"info\"\n",
    ] {
        assert!(fits(bad).is_some(), "{bad}");
    }
}
