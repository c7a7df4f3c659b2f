//! `kvrouted config`: checks, explains and compares configurations, and prints the schema of the file.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::exit::{Exit, Failure};
use super::{admin, serve};
use crate::config::{
    self, Config, Difference, Environment, FieldDifference, FieldInfo, Flags, Override, TableInfo, WorkerDifference,
    WrittenTable, socket_default,
};
use crate::error::Kind;
use crate::wire::{ConfigField, RunningConfigPage};

const VARIABLES_HELP: &str = "\
Variables of the environment win over the file: KVROUTED_CONFIG__TABLE__FIELD, in upper case, such as
KVROUTED_CONFIG__SERVE__SOCKET; of a repeated table with its number: KVROUTED_CONFIG__SPACE__0__MODEL. Lists are joined by +.";

/// Similar fields that are listed for a name that no field has.
const SIMILAR_MAX: usize = 3;

/// Works with configurations. Nothing here changes a daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = VARIABLES_HELP)]
pub struct ConfigArgs {
    /// The command.
    #[command(subcommand)]
    pub action: ConfigAction,
}

/// The commands about configurations.
#[derive(Debug, clap::Subcommand)]
pub enum ConfigAction {
    /// Check a file, with the variables of this environment, as `serve --check` does: list every problem, or say ok.
    Check {
        /// The configuration file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Say what a field does: its values, unit, default, whether a reload takes it over, and its variable.
    Explain {
        /// The field, such as serve.socket, worker.endpoint or policy.temperature; or a table, such as serve
        #[arg(value_name = "FIELD")]
        field: String,
    },
    /// Show what a reload of a file would change in a running daemon. Exits with 0 if nothing, with 1 if something.
    Diff {
        /// The configuration file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The daemon's Unix socket
        #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
        socket: PathBuf,
        /// The daemon's admin socket [default: as the daemon says on its socket]
        #[arg(long, value_name = "PATH")]
        admin_socket: Option<PathBuf>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print a JSON Schema of the file, for editors.
    Schema,
}

impl ConfigArgs {
    /// Runs the command.
    ///
    /// # Errors
    /// A file that cannot be used, an unknown field, a daemon that does not answer, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let mut stdout = std::io::stdout().lock();
        match &self.action {
            ConfigAction::Check { file } => {
                let config =
                    config::load(Some(file), &Environment::of_process(), &Flags::default()).map_err(unusable)?;
                serve::check(&config, &mut stdout)
            }
            ConfigAction::Explain { field } => {
                stdout.write_all(explain(field)?.as_bytes())?;
                stdout.flush()?;
                Ok(Exit::Done)
            }
            ConfigAction::Diff { file, socket, admin_socket, json } => {
                let socket = admin_socket.as_ref().unwrap_or(socket);
                let (text, exit) = diff(file, socket, *json)?;
                stdout.write_all(text.as_bytes())?;
                stdout.flush()?;
                Ok(exit)
            }
            ConfigAction::Schema => {
                writeln!(stdout, "{:#}", config::schema())?;
                stdout.flush()?;
                Ok(Exit::Done)
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unusable(problems: config::Problems) -> Failure {
    Failure::new(Exit::Usage, format!("the configuration cannot be used\n{problems}"))
}

// ---- explain ----

/// The description of a field or a table.
fn explain(path: &str) -> Result<String, Failure> {
    if let Some((table, field)) = config::field_at(path) {
        return Ok(explain_field(path, table, field));
    }
    if let Some(table) = config::table_at(path) {
        return Ok(explain_table(table));
    }
    let similar = config::similar_fields(path, SIMILAR_MAX);
    let tables: Vec<&str> = config::tables().iter().map(|table| table.name).collect();
    let hint = match similar.as_slice() {
        [] => format!("name one as TABLE.FIELD; the tables are {}", tables.join(", ")),
        similar => format!("did you mean {}?", similar.join(" or ")),
    };
    Err(Failure::new(Exit::Usage, format!("{path}: no such field; {hint}")))
}

fn explain_table(table: &TableInfo) -> String {
    let width = table.fields.iter().map(|field| field.name.len()).max().unwrap_or(0);
    let mut text = format!("{}\n{}\n\n", table.header(), table.doc);
    for field in &table.fields {
        let first = field.doc.lines().next().unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {:width$}  {first}", field.name);
    }
    text
}

fn explain_field(path: &str, table: &TableInfo, field: &FieldInfo) -> String {
    let is_own_policy = path.starts_with("space") && table.name == "policy";
    let header = if is_own_policy { "[space.policy]".to_owned() } else { table.header() };
    let default = match &field.default {
        _ if is_own_policy => "what [policy] says".to_owned(),
        Some(default) => default.clone(),
        None if field.is_required => "none: it must be set".to_owned(),
        None => "none: see above for what its absence means".to_owned(),
    };
    let reload = match (table.name, field.is_live) {
        ("relay", _) => "no: a relay reads it when it starts",
        (_, true) => "yes: SIGHUP takes a change over",
        (_, false) => "no: a change takes effect at the next start",
    };
    let own_policy = config::variable_of("space[0].policy", field.name);
    let variable = if is_own_policy { own_policy.clone() } else { table.variable(field.name) };
    let mut rows = vec![("values", field.bounds.clone())];
    rows.extend((!field.unit.is_empty()).then(|| ("unit", field.unit.to_owned())));
    rows.extend([("default", default), ("reload", reload.to_owned()), ("variable", variable)]);
    if table.name == "policy" && field.is_live && !is_own_policy {
        rows.push(("one space", format!("{} in [space.policy], {own_policy}", field.name)));
    }
    rows.push(("example", header));
    let mut text = format!("{path}\n{}\n\n", field.doc);
    for (name, value) in &rows {
        let _ = writeln!(text, "  {name:9}  {value}");
    }
    let _ = writeln!(text, "  {:9}  {} = {}", "", field.name, field.example);
    if table.is_repeated || is_own_policy {
        let repeated = if is_own_policy { "[[space]]".to_owned() } else { table.header() };
        let _ = writeln!(text, "\nThe number in the variable is that of the {repeated} in the file, from 0.");
    }
    text
}

// ---- diff ----

/// What a daemon told of its configuration.
struct Running {
    config: Config,
    /// What its environment and options set over the file.
    overrides: Vec<Override>,
    /// The file that a reload reads.
    file: Option<String>,
}

fn running(socket: &Path) -> Result<Running, Failure> {
    let mut client = admin::connect(socket)?;
    let page = client.running_config().map_err(|error| {
        // Exit code 1 says that something differs.
        let older = "the daemon does not tell its configuration: it is of an older release";
        let message = if error.kind() == Kind::Unsupported { older.to_owned() } else { error.to_string() };
        Failure::new(Exit::Unavailable, format!("{}: {message}", socket.display()))
    })?;
    let RunningConfigPage { fields, overrides, file, daemon_version, .. } = page;
    let source = format!("the configuration of the daemon at {}", socket.display());
    let config = Config::told(&source, tables_of(fields)).map_err(|problems| {
        let (own, its) = (env!("CARGO_PKG_VERSION"), daemon_version);
        let message = format!("{problems}\nit is of release {its}, this is {own}: use the kvrouted of its release");
        Failure::new(Exit::Unavailable, message)
    })?;
    let set = |ConfigField { table, name, value, source }: ConfigField| {
        Some(Override { source: source?, table, field: name, text: value })
    };
    Ok(Running { config, overrides: overrides.into_iter().filter_map(set).collect(), file })
}

fn tables_of(fields: Vec<ConfigField>) -> Vec<WrittenTable> {
    let mut tables: Vec<WrittenTable> = Vec::new();
    for ConfigField { table, name, value, .. } in fields {
        if tables.last().is_none_or(|last| last.path != table) {
            tables.push(WrittenTable { path: table, fields: Vec::new() });
        }
        if let Some(last) = tables.last_mut() {
            last.fields.push((name, value));
        }
    }
    tables
}

/// What a reload of a file would change in a daemon, as text, and the exit code.
fn diff(file: &Path, socket: &Path, as_json: bool) -> Result<(String, Exit), Failure> {
    // First, so that a file that cannot be used is said without a daemon.
    let text = config::text_of(file).map_err(unusable)?;
    let mut running = running(socket)?;
    if running.file.is_none() {
        // The space of its options is in the place of that of the file.
        running.overrides.retain(|set| set.is_variable() || !set.table.starts_with("space"));
    }
    let next = config::parse_as(&file.display().to_string(), &text, &running.overrides).map_err(unusable)?;
    let difference = running.config.difference(&next);
    let exit = if difference.is_empty() { Exit::Done } else { Exit::Refused };
    let text = if as_json { as_json_text(&difference, &running) } else { as_lines(&difference, &running) };
    Ok((text, exit))
}

fn shown(value: Option<&String>) -> &str {
    value.map_or("absent", String::as_str)
}

fn as_lines(difference: &Difference, running: &Running) -> String {
    let mut lines = Vec::new();
    let line = |name: &str, field: &FieldDifference| {
        let restart = if field.needs_restart { " (needs a restart)" } else { "" };
        format!("{name}: {} -> {}{restart}", shown(field.before.as_ref()), shown(field.after.as_ref()))
    };
    lines.extend(difference.fields.iter().map(|field| line(&field.field, field)));
    lines.extend(difference.added.iter().map(|worker| format!("worker {worker}: added")));
    lines.extend(difference.removed.iter().map(|worker| format!("worker {worker}: removed")));
    for WorkerDifference { worker, fields } in &difference.changed {
        lines.extend(fields.iter().map(|field| line(&format!("worker {worker}: {}", field.field), field)));
    }
    let restart = difference.fields.iter().filter(|field| field.needs_restart).count();
    let (fields, added) = (difference.fields.len(), difference.added.len());
    let (removed, changed) = (difference.removed.len(), difference.changed.len());
    lines.push(match difference.is_empty() {
        true => "no difference".to_owned(),
        false => format!(
            "differing fields: {fields}, of which need a restart: {restart}; workers added: {added}, removed: {removed}, \
             changed: {changed}"
        ),
    });
    if difference.is_refused {
        lines.push("the daemon refuses a reload of this file, as its [[space]] tables differ: restart it".to_owned());
    }
    match (&running.file, running.overrides.as_slice()) {
        (None, _) => lines.push("the daemon runs without a file: only a start with --config reads this one".to_owned()),
        (_, []) => {}
        (_, set) => {
            let set = set.iter().map(|set| format!("{}.{} ({})", set.table, set.field, set.source));
            let set = set.collect::<Vec<_>>().join(", ");
            lines.push(format!("set over the file by the daemon's environment and options: {set}"));
        }
    }
    lines.join("\n") + "\n"
}

fn as_json_text(difference: &Difference, running: &Running) -> String {
    let field = |field: &FieldDifference| {
        json!({
            "field": field.field, "running": field.before, "file": field.after, "needs_restart": field.needs_restart,
        })
    };
    let fields = |list: &[FieldDifference]| list.iter().map(field).collect::<Vec<_>>();
    let changed = difference.changed.iter();
    let changed = changed.map(|worker| json!({ "worker": worker.worker, "fields": fields(&worker.fields) }));
    let overrides = running.overrides.iter();
    let overrides =
        overrides.map(|set| json!({ "field": format!("{}.{}", set.table, set.field), "source": set.source }));
    let all = json!({
        "fields": fields(&difference.fields),
        "workers": {
            "added": difference.added, "removed": difference.removed, "changed": changed.collect::<Vec<_>>(),
        },
        "reload_refused": difference.is_refused,
        "daemon_file": running.file,
        "overrides": overrides.collect::<Vec<_>>(),
    });
    format!("{all}\n")
}
