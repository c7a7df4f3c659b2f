//! A generated workload by its name and parameters: `chat:sessions_per_s=4;turns.mean=6`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Workload;
use super::generators::{Agents, Chat, FewShot, Retrieval};
use crate::config::nearest;

/// A generator with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Generator {
    /// People who chat with an application.
    Chat(Chat),
    /// Questions about documents.
    Documents(Retrieval),
    /// Agents that call tools, in closed loop.
    Agents(Agents),
    /// Short questions after long examples.
    FewShot(FewShot),
}

/// The names of the generators.
pub const GENERATORS: [&str; 4] = ["chat", "documents", "agents", "few-shot"];

impl Generator {
    /// Reads `NAME` or `NAME:PARAMETER=VALUE;…`. A parameter of a distribution has two names: `turns.mean`. The value
    /// `none` stands for none.
    ///
    /// # Errors
    /// What is wrong, and what to write.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, parameters) = text.split_once(':').unwrap_or((text, ""));
        match name {
            "chat" => Ok(Self::Chat(with(Chat::default(), parameters)?)),
            "documents" => Ok(Self::Documents(with(Retrieval::default(), parameters)?)),
            "agents" => Ok(Self::Agents(with(Agents::default(), parameters)?)),
            "few-shot" => Ok(Self::FewShot(with(FewShot::default(), parameters)?)),
            _ => {
                let meant = nearest(name, GENERATORS).map(|near| format!("; did you mean {near}?")).unwrap_or_default();
                Err(format!("there is no generator {name:?}; there are {}{meant}", GENERATORS.join(", ")))
            }
        }
    }

    /// Requests of a workload.
    #[must_use]
    pub const fn requests(&self) -> usize {
        match self {
            Self::Chat(chat) => chat.requests,
            Self::Documents(retrieval) => retrieval.requests,
            Self::Agents(agents) => agents.requests,
            Self::FewShot(few_shot) => few_shot.requests,
        }
    }

    /// Sessions that are live at a time; `None` = they begin at times of their own.
    #[must_use]
    pub const fn live_sessions(&self) -> Option<usize> {
        match self {
            Self::Agents(agents) => agents.live_sessions,
            Self::Chat(_) | Self::Documents(_) | Self::FewShot(_) => None,
        }
    }

    /// The same with this many requests.
    #[must_use]
    pub fn with_requests(mut self, count: usize) -> Self {
        let requests = match &mut self {
            Self::Chat(chat) => &mut chat.requests,
            Self::Documents(retrieval) => &mut retrieval.requests,
            Self::Agents(agents) => &mut agents.requests,
            Self::FewShot(few_shot) => &mut few_shot.requests,
        };
        *requests = count;
        self
    }

    /// The same with this many live sessions. `None`: its sessions begin at times of their own.
    #[must_use]
    pub fn with_live_sessions(self, count: usize) -> Option<Self> {
        match self {
            Self::Agents(agents) => Some(Self::Agents(Agents { live_sessions: Some(count), ..agents })),
            Self::Chat(_) | Self::Documents(_) | Self::FewShot(_) => None,
        }
    }

    /// The workload of a seed.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        match self {
            Self::Chat(chat) => chat.generate(seed),
            Self::Documents(retrieval) => retrieval.generate(seed),
            Self::Agents(agents) => agents.generate(seed),
            Self::FewShot(few_shot) => few_shot.generate(seed),
        }
    }
}

/// A generator with some of its parameters set.
fn with<T: Serialize + DeserializeOwned>(generator: T, parameters: &str) -> Result<T, String> {
    let mut values = serde_json::to_value(generator).map_err(|error| error.to_string())?;
    for parameter in parameters.split(';').filter(|parameter| !parameter.trim().is_empty()) {
        let Some((name, value)) = parameter.split_once('=') else {
            return Err(format!("{parameter:?} sets nothing; write PARAMETER=VALUE"));
        };
        let (name, value) = (name.trim(), value.trim());
        let known = names(&values);
        let Some(place) = place_of(&mut values, name) else {
            let meant = nearest(name, known.iter().map(String::as_str));
            let meant = meant.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
            return Err(format!("there is no parameter {name:?}; there are {}{meant}", known.join(", ")));
        };
        *place = value_of(value).ok_or_else(|| {
            format!(
                "{name}={value}: a number of at least 0 is needed{}",
                if place.is_null() { ", or none" } else { "" }
            )
        })?;
    }
    serde_json::from_value(values).map_err(|error| format!("{parameters}: {error}"))
}

/// A number, or none.
fn value_of(text: &str) -> Option<Value> {
    if text == "none" {
        return Some(Value::Null);
    }
    if let Ok(whole) = text.parse::<u64>() {
        return Some(whole.into());
    }
    text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0).map(Into::into)
}

/// The names of all parameters.
fn names(values: &Value) -> Vec<String> {
    let of = |(name, value): (&String, &Value)| match value.as_object() {
        Some(parts) => parts.keys().map(|part| format!("{name}.{part}")).collect(),
        None => vec![name.clone()],
    };
    values.as_object().into_iter().flatten().flat_map(of).collect()
}

/// The place of a parameter.
fn place_of<'a>(values: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    let place = match name.split_once('.') {
        Some((name, part)) => values.get_mut(name)?.get_mut(part)?,
        None => values.get_mut(name)?,
    };
    (!place.is_object()).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::super::Arrivals;
    use super::*;

    #[test]
    fn parameters_are_set_by_name_and_the_others_stay() {
        let Ok(Generator::Chat(chat)) = Generator::parse("chat:sessions_per_s=4; turns.mean=6.5;applications=3") else {
            panic!("a generator");
        };
        assert_eq!((chat.sessions_per_s, chat.turns.mean, chat.applications), (4.0, 6.5, 3));
        assert_eq!(chat.message_tokens, Chat::default().message_tokens);
        assert_eq!(Generator::parse("few-shot"), Ok(Generator::FewShot(FewShot::default())));
    }

    #[test]
    fn every_generator_gives_as_many_requests_as_asked_for() {
        for name in GENERATORS {
            let generator = Generator::parse(name).expect(name).with_requests(70);
            assert_eq!(generator.generate(2).requests(), 70, "{name}");
        }
    }

    #[test]
    fn only_agents_have_live_sessions() {
        let live = |text: &str| Generator::parse(text).ok()?.with_live_sessions(9).map(|of| of.generate(1).arrivals);
        assert_eq!((live("agents"), live("chat")), (Some(Arrivals::Live(9)), None));
        let timed = Generator::parse("agents:live_sessions=none;sessions_per_s=1").expect("a generator");
        assert_eq!(timed.with_requests(50).generate(1).arrivals, Arrivals::Timed);
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_write() {
        for (text, says) in [
            ("chatt", "did you mean chat?"),
            ("rag", "chat, documents, agents, few-shot"),
            ("chat:turn.mean=3", "did you mean turns.mean?"),
            ("chat:turns=3", "turns.mean"),
            ("chat:applications", "write PARAMETER=VALUE"),
            ("chat:sessions_per_s=-1", "a number of at least 0 is needed"),
            ("chat:sessions_per_s=inf", "a number of at least 0 is needed"),
            ("chat:applications=2.5", "applications=2.5"),
            ("chat:sessions_per_s=none", "sessions_per_s=none"),
        ] {
            let message = Generator::parse(text).expect_err(text);
            assert!(message.contains(says), "{text}: {message}");
        }
    }
}
