//! Envoy's configuration: the recipe that users get, with this run's ports, with the picker and without it.

/// The recipe.
const RECIPE: &str = include_str!("../../../gateway/recipes/envoy.yaml");

/// Where its second endpoint begins, and its cluster of the picker.
const SECOND_ENDPOINT: &str = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8002}";
const PICKER: &str = "\n  - name: picker";

/// The ports of one Envoy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// For callers.
    pub(crate) callers: u16,
    /// Envoy's own.
    pub(crate) admin: u16,
    /// The upstream's.
    pub(crate) upstream: u16,
    /// The picker's; `None` = there is none.
    pub(crate) picker: Option<u16>,
}

/// The recipe with these ports and one endpoint. It writes no access log, as no proxy here does. Without a picker its
/// filter and its cluster are left out, and the policy that follows its list: Envoy then takes the only endpoint.
///
/// # Errors
/// The recipe is not as it was.
pub(crate) fn configuration(ports: Ports) -> Result<String, String> {
    let text = without(RECIPE, "          access_log:", "          route_config:")?;
    let text = without(&text, SECOND_ENDPOINT, PICKER)?;
    let text = match ports.picker {
        Some(picker) => port(&text, 9002, picker)?,
        None => {
            let text =
                without(&text, "          # Only the picker names", "          - name: envoy.filters.http.router")?;
            let text = without(&text, "    load_balancing_policy:", "    load_assignment:")?;
            text.split_once(PICKER).ok_or("the recipe has no cluster of the picker")?.0.to_owned()
        }
    };
    let text = port(&text, 10000, ports.callers)?;
    let text = port(&text, 9901, ports.admin)?;
    port(&text, 8001, ports.upstream)
}

fn port(text: &str, from: u16, to: u16) -> Result<String, String> {
    let old = format!("port_value: {from}}}");
    if !text.contains(&old) {
        return Err(format!("the recipe has no port {from}"));
    }
    Ok(text.replace(&old, &format!("port_value: {to}}}")))
}

/// The text without the first `from` and what follows it, up to `until`.
fn without(text: &str, from: &str, until: &str) -> Result<String, String> {
    let begin = text.find(from).ok_or_else(|| format!("the recipe has no '{}'", from.trim()))?;
    let length = text[begin..].find(until).ok_or_else(|| format!("the recipe has no '{}'", until.trim()))?;
    Ok([&text[..begin], &text[begin + length..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picker_can_be_left_out_of_the_recipe() {
        let ports = Ports { callers: 11, admin: 12, upstream: 13, picker: None };
        let alone = configuration(ports).expect("a configuration");
        let with = configuration(Ports { picker: Some(14), ..ports }).expect("a configuration");
        for text in [&alone, &with] {
            for port in [11, 12, 13] {
                assert_eq!(text.matches(&format!("port_value: {port}}}")).count(), 1, "{port}");
            }
            assert!(!text.contains("access_log") && !text.contains("port_value: 800"));
        }
        assert!(with.contains("port_value: 14}") && with.contains("ext_proc") && with.contains("override_host"));
        assert!(!alone.contains("name: picker") && !alone.contains("ext_proc") && !alone.contains("override_host"));
    }
}
