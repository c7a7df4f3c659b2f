//! A real nginx or HAProxy with the files of `gateway/recipes`.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::kit::ports::free_address;

/// How long a proxy may take to start.
const START: Duration = Duration::from_secs(30);

/// Which proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Nginx,
    Haproxy,
}

impl Kind {
    const fn program(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
        }
    }

    const fn packages(self) -> &'static str {
        match self {
            Self::Nginx => "nginx libnginx-mod-http-lua",
            Self::Haproxy => "haproxy",
        }
    }

    /// The configuration, and the script beside it.
    const fn files(self) -> [&'static str; 2] {
        match self {
            Self::Nginx => ["nginx.conf", "nginx.lua"],
            Self::Haproxy => ["haproxy.cfg", "haproxy.lua"],
        }
    }

    /// The bytes of a body that the recipe lets pass.
    pub(crate) const fn body_bytes_max(self) -> usize {
        match self {
            Self::Nginx => 32 << 20,
            Self::Haproxy => 1 << 20,
        }
    }

    /// The status where no engine of the list took the request.
    pub(crate) const fn nobody(self) -> u16 {
        match self {
            Self::Nginx => 502,
            Self::Haproxy => 503,
        }
    }

    /// The program, or a line that `scripts/test` lists at its end.
    pub(crate) fn program_or_skip(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        // Debian installs both where only root's PATH leads.
        let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
        let program = folders.map(|folder| folder.join(self.program())).find(|path| path.is_file());
        let has_module = self != Self::Nginx || Path::new("/usr/lib/nginx/modules/ngx_http_lua_module.so").is_file();
        if let Some(program) = program.filter(|_| has_module) {
            return Some(program);
        }
        // Past the test harness, which shows what tests print only if they fail.
        let (name, packages) = (self.program(), self.packages());
        let line = format!("\nskipped: {name}: it is not installed (Debian: apt-get install {packages})\n");
        std::io::stderr().lock().write_all(line.as_bytes()).expect("said");
        None
    }
}

/// A proxy that serves; it ends with the test.
pub(crate) struct Process {
    child: Child,
    folder: tempfile::TempDir,
    /// Where callers connect.
    pub(crate) callers: SocketAddr,
}

impl Drop for Process {
    fn drop(&mut self) {
        // nginx's workers end with their master only if it may tell them.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            let tail: Vec<_> = log.lines().rev().take(20).collect();
            eprintln!("the end of the proxy's log, newest line first:\n{}", tail.join("\n"));
        }
    }
}

impl Process {
    /// Starts it with three engines and waits until it listens.
    pub(crate) async fn start(
        kind: Kind,
        program: &Path,
        engines: &[SocketAddr],
        pick: SocketAddr,
        log: SocketAddr,
    ) -> Self {
        // The workers of a root's nginx are of another user.
        let open_to_all = fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(open_to_all).tempdir().expect("a folder");
        let callers = free_address();
        write_recipe(kind, folder.path(), callers, engines, pick, log);
        let mut command = Command::new(program);
        match kind {
            Kind::Nginx => {
                command.arg("-p").arg(format!("{}/", folder.path().display())).args(["-c", "nginx.conf", "-e", "log"]);
                command.args(["-g", "daemon off;"]);
            }
            Kind::Haproxy => {
                command.arg("-db").arg("-f").arg(folder.path().join("haproxy.cfg"));
            }
        }
        let output = File::options().append(true).create(true).open(folder.path().join("log")).expect("a file");
        command.stdin(Stdio::null()).stdout(output.try_clone().expect("a file")).stderr(output);
        let child = command.spawn().expect("the proxy starts");
        let mut process = Self { child, folder, callers };
        let begun = Instant::now();
        while tokio::net::TcpStream::connect(callers).await.is_err() {
            let ended = process.child.try_wait().expect("a status");
            assert!(ended.is_none() && begun.elapsed() < START, "{kind:?} does not listen: {ended:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        process
    }
}

/// Writes the recipe's files with the test's addresses, and for nginx with a folder of the test's.
fn write_recipe(
    kind: Kind,
    folder: &Path,
    callers: SocketAddr,
    engines: &[SocketAddr],
    pick: SocketAddr,
    log: SocketAddr,
) {
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let texts = kind.files().map(|name| fs::read_to_string(recipes.join(name)).expect("the recipe"));
    let mut texts = texts.map(|text| text.lines().filter(|line| !is_comment(line)).collect::<Vec<_>>().join("\n"));
    let mut changes: Vec<(String, String)> = vec![("127.0.0.1:8080".to_owned(), callers.to_string())];
    changes.extend((8001..).zip(engines).map(|(port, engine)| (format!("127.0.0.1:{port}"), engine.to_string())));
    // One of the gateway's addresses stands in the configuration, the other one in the script.
    let gateway = [(8081, pick), (8082, log)];
    let [(port, in_config), (script_port, in_script)] =
        if kind == Kind::Nginx { gateway } else { [gateway[1], gateway[0]] };
    changes.push((format!("127.0.0.1:{port}"), in_config.to_string()));
    changes.push((format!("\"127.0.0.1\", {script_port}"), format!("\"127.0.0.1\", {}", in_script.port())));
    if kind == Kind::Nginx {
        changes.push(("/run/nginx.pid".to_owned(), "nginx.pid".to_owned()));
        changes.push(("/var/log/nginx/error.log".to_owned(), "log".to_owned()));
        let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let places: String = kinds.map(|kind| format!("{kind}_temp_path {kind};\n")).concat();
        changes.push(("http {\n".to_owned(), format!("http {{\n{places}")));
    }
    // Two steps, so that a new port is not taken for one of the recipe.
    for (at, (written, _)) in changes.iter().enumerate() {
        assert!(texts.iter().any(|text| text.contains(written)), "{:?} names no {written}", kind.files());
        texts = texts.map(|text| text.replace(written, &format!("@{at}@")));
    }
    for (at, (_, used)) in changes.iter().enumerate() {
        texts = texts.map(|text| text.replace(&format!("@{at}@"), used));
    }
    for (name, text) in kind.files().into_iter().zip(&texts) {
        fs::write(folder.join(name), format!("{text}\n")).expect("written");
    }
}

fn is_comment(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with('#') || line.starts_with("--")
}
