//! Problems of a configuration: where each is, what is wrong, and what was probably meant.

use std::fmt;

/// Where a problem is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// The document as a whole.
    Document,
    /// A line and a column in characters, both from 1.
    Line {
        /// The line.
        line: u32,
        /// The column.
        column: u32,
    },
    /// A command-line flag, as written (`--socket`).
    Flag(String),
    /// A variable of the environment, by its name.
    Variable(String),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Document => f.write_str("the file"),
            Self::Line { line, .. } => write!(f, "line {line}"),
            Self::Flag(name) | Self::Variable(name) => f.write_str(name),
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where it is.
    pub location: Location,
    /// The field, as `table.field` or `worker[2].field` (from 0); empty for a syntax error.
    pub path: String,
    /// What is wrong, and what is expected.
    pub message: String,
    /// The valid name most like the written one.
    pub nearest: Option<String>,
}

impl Problem {
    /// A problem without a suggestion.
    #[must_use]
    pub fn new(location: Location, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { location, path: path.into(), message: message.into(), nearest: None }
    }

    /// Adds the name that was probably meant.
    #[must_use]
    pub fn suggest(mut self, nearest: Option<&str>) -> Self {
        self.nearest = nearest.map(str::to_owned);
        self
    }

    /// The line in the file, if the problem has one.
    #[must_use]
    pub const fn line(&self) -> Option<u32> {
        match self.location {
            Location::Line { line, .. } => Some(line),
            Location::Document | Location::Flag(_) | Location::Variable(_) => None,
        }
    }
}

/// Every problem of one configuration, in the order of the lines; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// The file's path, or `command line`.
    pub source: String,
    /// The problems.
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    /// One line for each problem: `source:line:column: field: message; did you mean ...?`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.list.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            match &problem.location {
                Location::Document => f.write_str(&self.source)?,
                Location::Line { line, column } => write!(f, "{}:{line}:{column}", self.source)?,
                Location::Flag(name) | Location::Variable(name) => f.write_str(name)?,
            }
            if !problem.path.is_empty() {
                write!(f, ": {}", problem.path)?;
            }
            write!(f, ": {}", problem.message)?;
            if let Some(nearest) = &problem.nearest {
                write!(f, "; did you mean `{nearest}`?")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The candidate that was probably meant by `written`, if any: at most a third of the candidate's characters, and one
/// more, may differ.
pub(crate) fn nearest<'a>(written: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let written = written.to_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&written, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.chars().count() / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_near() {
        let names = ["socket", "socket_mode", "admin_socket", "cores", "drain_ms_max"];
        assert_eq!(nearest("sokcet", names), Some("socket"));
        assert_eq!(nearest("Cores", names), Some("cores"));
        assert_eq!(nearest("drain_max_ms", names), Some("drain_ms_max"));
        assert_eq!(nearest("temperature", names), None);
    }

    #[test]
    fn a_listing_names_place_field_and_suggestion() {
        let list = vec![
            Problem::new(Location::Line { line: 3, column: 1 }, "serve.sokcet", "unknown field")
                .suggest(Some("socket")),
            Problem::new(Location::Flag("--worker".into()), "worker[0].id", "missing"),
        ];
        let problems = Problems { source: "k.toml".into(), list };
        assert_eq!(
            problems.to_string(),
            "k.toml:3:1: serve.sokcet: unknown field; did you mean `socket`?\n--worker: worker[0].id: missing"
        );
    }
}
