//! The table of engines that are pods.

use super::check::Checker;
use super::raw::RawKubernetes;
use crate::kubernetes::{ApiAccess, PortName};
use crate::limits::KUBERNETES_PORTS_MAX;

/// Pods that are the engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// Whether `name` is an InferencePool; otherwise it is a service.
    pub is_pool: bool,
    /// The namespace; `None` = that of this pod.
    pub namespace: Option<String>,
    /// The name of the service or the pool.
    pub name: String,
    /// The port of each rank; empty = the service's only one, or those of the pool.
    pub ports: Vec<PortName>,
    /// The API server; `None` = that of the cluster whose pod this is.
    pub access: Option<ApiAccess>,
}

/// A flag for the server, or for the source, replaces what the file says of it.
pub(super) fn check(checker: &mut Checker, file: RawKubernetes, flags: &RawKubernetes) -> Option<KubernetesConfig> {
    let mut raw = file;
    if flags.service.is_some() || flags.pool.is_some() {
        (raw.service, raw.pool) = (flags.service.clone(), flags.pool.clone());
        raw.ports.clone_from(&flags.ports);
    }
    if flags.url.is_some() {
        (raw.url, raw.token_file, raw.ca_file) = (flags.url.clone(), flags.token_file.clone(), flags.ca_file.clone());
    }
    let (is_pool, text) = match (&raw.service, &raw.pool) {
        (None, None) => {
            if raw != RawKubernetes::default() {
                checker.problem("kubernetes.service", "missing; name a service, or an InferencePool in pool");
            }
            return None;
        }
        (Some(_), Some(_)) => {
            checker.problem("kubernetes.pool", "a service is named too; remove one of the two");
            return None;
        }
        (Some(service), None) => (false, service),
        (None, Some(pool)) => (true, pool),
    };
    let field = if is_pool { "kubernetes.pool" } else { "kubernetes.service" };
    let (namespace, name) = match text.split_once('/') {
        Some((namespace, name)) => (Some(namespace.to_owned()), name.to_owned()),
        None => (None, text.clone()),
    };
    if !is_object_name(&name) || namespace.as_deref().is_some_and(|namespace| !is_object_name(namespace)) {
        checker.problem(field, format!("`{text}` is no name of an object; write NAMESPACE/NAME or NAME"));
    }
    let ports = ports(checker, is_pool, &raw.ports);
    let access = access(checker, &raw);
    Some(KubernetesConfig { is_pool, namespace, name, ports, access })
}

fn ports(checker: &mut Checker, is_pool: bool, listed: &[String]) -> Vec<PortName> {
    if is_pool && !listed.is_empty() {
        checker.problem("kubernetes.ports", "a pool names its ports itself, in spec.targetPorts; remove it");
    }
    if listed.len() > KUBERNETES_PORTS_MAX {
        checker.problem("kubernetes.ports", format!("there are more than {KUBERNETES_PORTS_MAX}; write less"));
    }
    let mut ports: Vec<PortName> = Vec::with_capacity(listed.len());
    for text in listed {
        match text.parse() {
            Ok(port) if ports.contains(&port) => {
                checker
                    .problem("kubernetes.ports", format!("`{text}` is there twice; each rank has a port of its own"));
            }
            Ok(port) => ports.push(port),
            Err(why) => checker.problem("kubernetes.ports", format!("`{text}`: {why}")),
        }
    }
    ports
}

fn access(checker: &mut Checker, raw: &RawKubernetes) -> Option<ApiAccess> {
    let Some(url) = raw.url.clone() else {
        if raw.token_file.is_some() || raw.ca_file.is_some() {
            let message = "missing; token_file and ca_file are for it, and a pod has those of its account";
            checker.problem("kubernetes.url", message);
        }
        return None;
    };
    let access = ApiAccess { url, token_file: raw.token_file.clone(), ca_file: raw.ca_file.clone() };
    if let Err(error) = access.base() {
        checker.problem("kubernetes.url", error.to_string());
    }
    Some(access)
}

/// Whether a text can name a service, a pool or a namespace: RFC 1123's subdomain.
fn is_object_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let is_end = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let bytes = text.as_bytes();
    bytes.len() <= 253 && bytes.iter().all(|byte| is_inner(*byte)) && is_end(bytes.first()) && is_end(bytes.last())
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Flags, RawKubernetes, load};

    fn loaded(file: &str, change: impl FnOnce(&mut Flags)) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        std::fs::write(&path, file).expect("written");
        let mut flags = Flags::default();
        change(&mut flags);
        load(Some(&path), &flags).map_err(|problems| problems.to_string())
    }

    #[test]
    fn a_service_or_a_pool_takes_the_place_of_engines() {
        let config = loaded("kubernetes.service = \"serving/vllm\"\nkubernetes.ports = [\"http\", \"8001\"]\n", |_| {});
        let kubernetes = config.expect("a configuration").kubernetes.expect("pods");
        assert_eq!((kubernetes.namespace.as_deref(), kubernetes.name.as_str()), (Some("serving"), "vllm"));
        assert!(!kubernetes.is_pool && kubernetes.ports.len() == 2 && kubernetes.access.is_none());
        let flags = RawKubernetes {
            pool: Some("llama".into()),
            url: Some("https://api:6443".into()),
            token_file: Some("token".into()),
            ..RawKubernetes::default()
        };
        let config = loaded("kubernetes.service = \"other\"\n", |given| given.kubernetes = flags);
        let kubernetes = config.expect("the flag wins").kubernetes.expect("pods");
        assert!(kubernetes.is_pool && kubernetes.namespace.is_none() && kubernetes.access.is_some());
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_field() {
        for (file, field) in [
            ("kubernetes.service = \"a\"\nkubernetes.pool = \"b\"", "kubernetes.pool"),
            ("kubernetes.service = \"A/b\"", "kubernetes.service"),
            ("kubernetes.service = \"a/b/c\"", "kubernetes.service"),
            ("kubernetes.pool = \"\"", "kubernetes.pool"),
            ("kubernetes.pool = \"a\"\nkubernetes.ports = [\"http\"]", "kubernetes.ports"),
            ("kubernetes.service = \"a\"\nkubernetes.ports = [\"0\"]", "kubernetes.ports"),
            ("kubernetes.service = \"a\"\nkubernetes.ports = [\"80\", \"80\"]", "kubernetes.ports"),
            ("kubernetes.service = \"a\"\nkubernetes.ca_file = \"b\"", "kubernetes.url"),
            ("kubernetes.service = \"a\"\nkubernetes.url = \"api\"", "kubernetes.url"),
            ("kubernetes.url = \"https://api\"", "kubernetes.service"),
            ("kubernetes.service = \"a\"\n[[engine]]\nurl = \"http://a:1\"", "engine: the engines are pods"),
        ] {
            let problems = loaded(file, |_| {}).expect_err(file);
            assert!(problems.contains(field), "{file}: {problems}");
        }
    }
}
