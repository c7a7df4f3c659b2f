//! A field of the field table: name, unit, default, kind with bounds, reload, and documentation. A kind also parses
//! values.

use super::problem::nearest;

/// The value of a field that is not set, written as on the command line.
#[derive(Clone, Copy, Debug)]
pub(super) enum Preset {
    /// A default.
    Value(&'static str),
    /// None: the field must be set. With an example.
    Required(&'static str),
    /// None: an absent field has a meaning of its own. With an example.
    Absent(&'static str),
}

/// A field's type and bounds, and the function that stores an accepted value.
pub(super) enum Kind<T> {
    Integer { min: u64, max: u64, set: fn(&mut T, u64) },
    Number { min: f64, max: f64, set: fn(&mut T, f64) },
    Flag { set: fn(&mut T, bool) },
    Choice { names: &'static [&'static str], set: fn(&mut T, usize) },
    Text { bytes_min: usize, bytes_max: usize, set: fn(&mut T, &str) },
    List { items_max: usize, bytes_max: usize, set: fn(&mut T, Vec<String>) },
    Parsed { what: &'static str, set: fn(&mut T, &str) -> Result<(), ValueError> },
}

/// One field of a table.
pub(super) struct Field<T: 'static> {
    pub(super) name: &'static str,
    /// The unit of its value; empty if it has none.
    pub(super) unit: &'static str,
    pub(super) preset: Preset,
    pub(super) kind: Kind<T>,
    pub(super) reload: Reload<T>,
    /// For operators: what the field does, and what follows from its value.
    pub(super) doc: &'static str,
}

/// When a changed field takes effect.
pub(super) enum Reload<T> {
    /// When a running daemon reads the file again, on SIGHUP.
    Live,
    /// At the next start. `path` is `table.field`; `differs` compares the field in two configurations.
    Restart { path: &'static str, differs: fn(&T, &T) -> bool },
    /// At the next start. No single field of the table is compared: see `reload`.
    AtStart,
}

impl<T> Field<T> {
    /// Whether a running daemon takes over a change of the field.
    pub(super) const fn is_live(&self) -> bool {
        matches!(self.reload, Reload::Live)
    }
}

/// One table of the document and its fields.
pub(super) struct Section<T: 'static> {
    pub(super) name: &'static str,
    /// Whether its header is `[[name]]` and may occur several times.
    pub(super) repeated: bool,
    pub(super) doc: &'static str,
    pub(super) fields: &'static [Field<T>],
}

impl<T> Section<T> {
    pub(super) fn field(&self, name: &str) -> Option<&'static Field<T>> {
        self.fields.iter().find(|field| field.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.fields.iter().map(|field| field.name)
    }
}

/// Why a value was refused.
#[derive(Debug, PartialEq)]
pub(super) struct ValueError {
    pub(super) message: String,
    pub(super) nearest: Option<String>,
}

impl ValueError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), nearest: None }
    }

    pub(super) fn near(message: impl Into<String>, nearest: Option<&str>) -> Self {
        Self { message: message.into(), nearest: nearest.map(str::to_owned) }
    }
}

/// A value as written, before a field has checked it.
#[derive(Debug)]
pub(super) enum Written<'a> {
    Integer(i64),
    Number(f64),
    Flag(bool),
    Text(&'a str),
    List(Vec<String>),
    /// A type that no field has, by name.
    Other(&'static str),
}

impl Written<'_> {
    const fn type_name(&self) -> &'static str {
        match self {
            Self::Integer(_) => "an integer",
            Self::Number(_) => "a number",
            Self::Flag(_) => "a boolean",
            Self::Text(_) => "a string",
            Self::List(_) => "a list of strings",
            Self::Other(name) => name,
        }
    }
}

/// A string in TOML.
pub(super) fn quoted(text: &str) -> String {
    toml_edit::Value::from(text).to_string()
}

/// A list of strings in TOML.
pub(super) fn listed<'a>(items: impl Iterator<Item = &'a str>) -> String {
    format!("[{}]", items.map(quoted).collect::<Vec<_>>().join(", "))
}

impl<T> Kind<T> {
    /// A value that the field has accepted, in the one TOML notation that all notations of it have. Empty if it is of a type
    /// that no field accepts.
    pub(super) fn toml(&self, written: &Written<'_>) -> String {
        match (self, written) {
            (Self::Number { .. }, Written::Integer(value)) => format!("{:?}", *value as f64),
            (_, Written::Integer(value)) => value.to_string(),
            (_, Written::Number(value)) => format!("{value:?}"),
            (_, Written::Flag(value)) => value.to_string(),
            (_, Written::List(items)) => listed(items.iter().map(String::as_str)),
            (_, Written::Text(text)) => self.toml_of_text(text),
            (_, Written::Other(_)) => String::new(),
        }
    }

    /// As [`Kind::toml`], of a value as [`Kind::set_text`] takes it.
    pub(super) fn toml_of_text(&self, text: &str) -> String {
        match self {
            Self::Integer { .. } => match text.parse::<u64>() {
                Ok(value) if value > i64::MAX as u64 => quoted(text),
                Ok(value) => value.to_string(),
                Err(_) => text.to_owned(),
            },
            Self::Number { .. } => text.parse::<f64>().map_or_else(|_| text.to_owned(), |value| format!("{value:?}")),
            Self::Flag { .. } => text.to_owned(),
            Self::Choice { .. } | Self::Text { .. } | Self::Parsed { .. } => quoted(text),
            Self::List { .. } => listed(text.split('+').filter(|item| !item.is_empty())),
        }
    }

    pub(super) const fn expected(&self) -> &'static str {
        match self {
            Self::Integer { .. } => "an integer",
            Self::Number { .. } => "a number",
            Self::Flag { .. } => "true or false",
            Self::Choice { .. } | Self::Text { .. } => "a string",
            Self::List { .. } => "a list of strings",
            Self::Parsed { what, .. } => what,
        }
    }

    /// Whether a value of this kind is quoted in TOML.
    pub(super) const fn is_quoted(&self) -> bool {
        matches!(self, Self::Choice { .. } | Self::Text { .. } | Self::Parsed { .. })
    }

    /// The bounds in words.
    pub(super) fn bounds(&self) -> String {
        match self {
            Self::Integer { min, max, .. } => format!("{min} to {max}"),
            Self::Number { min, max, .. } if *max == f64::MAX => format!("at least {min}"),
            Self::Number { min, max, .. } => format!("{min} to {max}"),
            Self::Flag { .. } => "true or false".to_owned(),
            Self::Choice { names, .. } => names.join(", "),
            Self::Text { bytes_max, .. } => format!("at most {bytes_max} bytes"),
            Self::List { items_max, .. } => format!("at most {items_max} strings"),
            Self::Parsed { what, .. } => (*what).to_owned(),
        }
    }

    /// Sets the field to the document's value.
    pub(super) fn set(&self, target: &mut T, written: Written<'_>) -> Result<(), ValueError> {
        match (self, written) {
            (Self::Integer { set, .. }, Written::Integer(value)) => {
                let value = u64::try_from(value).ok().and_then(|value| self.integer_in_bounds(value));
                set(target, value.ok_or_else(|| self.out_of_bounds())?);
            }
            // TOML's integers end at 2^63-1, identities and seeds at 2^64-1. Larger ones are written in quotes.
            (Self::Integer { max, .. }, Written::Text(text)) if *max > i64::MAX as u64 => {
                return self.set_text(target, text);
            }
            (Self::Number { .. }, Written::Integer(value)) => self.set_number(target, value as f64)?,
            (Self::Number { .. }, Written::Number(value)) => self.set_number(target, value)?,
            (Self::Flag { set }, Written::Flag(value)) => set(target, value),
            (Self::Choice { .. } | Self::Text { .. } | Self::Parsed { .. }, Written::Text(text)) => {
                return self.set_text(target, text);
            }
            (Self::List { .. }, Written::List(items)) => self.set_list(target, items)?,
            (Self::Integer { .. } | Self::Number { .. } | Self::Flag { .. }, Written::Text(text)) => {
                // Suggest the value without quotes only if it is valid.
                let bare = self.set_text(target, text).is_ok().then_some(text);
                return Err(ValueError::near(format!("expected {}, found a string", self.expected()), bare));
            }
            (_, written) => {
                return Err(ValueError::new(format!("expected {}, found {}", self.expected(), written.type_name())));
            }
        }
        Ok(())
    }

    /// Sets the field to the value of a default or a flag: without quotes, lists joined by `+`.
    pub(super) fn set_text(&self, target: &mut T, text: &str) -> Result<(), ValueError> {
        match self {
            Self::Integer { set, .. } => {
                // Wider than any field, so that an integer that is too large gets the message with the bounds.
                let value: i128 = text.parse().map_err(|_| self.not_a(text))?;
                let value = u64::try_from(value).ok().and_then(|value| self.integer_in_bounds(value));
                set(target, value.ok_or_else(|| self.out_of_bounds())?);
            }
            Self::Number { .. } => self.set_number(target, text.parse().map_err(|_| self.not_a(text))?)?,
            Self::Flag { set } => set(target, text.parse().map_err(|_| self.not_a(text))?),
            Self::Choice { names, set } => match names.iter().position(|name| *name == text) {
                Some(at) => set(target, at),
                None => {
                    let near = nearest(text, names.iter().copied());
                    return Err(ValueError::near(format!("`{text}` is none of {}", names.join(", ")), near));
                }
            },
            Self::Text { bytes_min, bytes_max, set } => {
                if text.len() < *bytes_min {
                    return Err(ValueError::new("must not be empty"));
                }
                if text.len() > *bytes_max {
                    return Err(ValueError::new(format!("is {} bytes, at most {bytes_max} are allowed", text.len())));
                }
                set(target, text);
            }
            Self::List { .. } => {
                self.set_list(target, text.split('+').filter(|item| !item.is_empty()).map(str::to_owned).collect())?;
            }
            Self::Parsed { set, .. } => set(target, text)?,
        }
        Ok(())
    }

    fn set_number(&self, target: &mut T, value: f64) -> Result<(), ValueError> {
        match self {
            // No range contains NaN.
            Self::Number { min, max, set } if (*min..=*max).contains(&value) => set(target, value),
            _ => return Err(self.out_of_bounds()),
        }
        Ok(())
    }

    fn set_list(&self, target: &mut T, items: Vec<String>) -> Result<(), ValueError> {
        let Self::List { items_max, bytes_max, set } = self else { return Ok(()) };
        if items.len() > *items_max {
            return Err(ValueError::new(format!("has {} entries, at most {items_max} are allowed", items.len())));
        }
        if let Some(item) = items.iter().find(|item| item.is_empty() || item.len() > *bytes_max) {
            return Err(ValueError::new(format!("an entry must have 1 to {bytes_max} bytes, one has {}", item.len())));
        }
        set(target, items);
        Ok(())
    }

    const fn integer_in_bounds(&self, value: u64) -> Option<u64> {
        match self {
            Self::Integer { min, max, .. } if *min <= value && value <= *max => Some(value),
            _ => None,
        }
    }

    fn out_of_bounds(&self) -> ValueError {
        ValueError::new(format!("out of range, must be {}", self.bounds()))
    }

    fn not_a(&self, text: &str) -> ValueError {
        ValueError::new(format!("expected {}, found `{text}`", self.expected()))
    }
}
