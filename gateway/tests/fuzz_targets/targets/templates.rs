//! Chat templates of a model's folder, and the bodies that they are used for.

use kvrouted_gateway::api::ApiPath;
use kvrouted_gateway::tokens::readers::local_text;

/// The most text that a template may make, bytes.
const TEXT_BYTES_MAX: usize = 4 << 21;
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n\
                        {{ message.content if message.content is string else message.content | tojson }}{% endfor %}\
                        {% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\
                        {% if add_generation_prompt %}<|assistant|>{% endif %}";
const BODY: &[u8] = br#"{"model": "m", "messages": [{"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}"#;

/// The first byte says whether the rest is a template or a body. Time and text stay within their bounds.
pub(crate) fn chat_template(data: &[u8]) {
    let [kind, rest @ ..] = data else { return };
    let text = match kind % 3 {
        0 => local_text(ApiPath::ChatCompletions, BODY, &String::from_utf8_lossy(rest)),
        1 => local_text(ApiPath::ChatCompletions, rest, TEMPLATE),
        _ => local_text(ApiPath::Completions, rest, TEMPLATE),
    };
    assert!(text.map_or(0, |text| text.len()) <= TEXT_BYTES_MAX, "more text than allowed");
}
