//! Jinja as transformers sets it up: its spacing, its filters and functions, Python's methods.

use super::marks::around;
use super::spaces::strip_as_python;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::fmt::Write as _;

/// Instructions that one rendering may take, some seconds of them: a long conversation takes thousands.
const FUEL: u64 = 20_000_000;
/// Spaces a level that `tojson` may write.
const MAX_INDENT: usize = 64;

/// Jinja as transformers sets it up.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the defaults"));
    environment.set_unknown_method_callback(methods);
    environment.add_filter("trim", |text: Value, what: Option<String>| {
        let text = soft_text(&text)?;
        Ok::<_, Error>(strip_as_python(&text, what.as_deref(), true, true).to_owned())
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: Value| match value.kind() {
        ValueKind::String => value,
        _ => Value::from(python_text(&value)),
    });
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => Ok(write!(out, "{}", python_text(value))?),
        _ => escape_formatter(out, state, value),
    });
    environment.add_filter("dflop_generation", |text: String| around(&text, None));
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    // Nothing can be read from `none`, whatever the engine says.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |_format: String| -> Result<Value, Error> {
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "it asks for the date (`strftime_now`), and a sample must have the same tokens every day: write a date \
             into the template",
        ))
    });
    environment
}

/// A text as it is; nothing for what is undefined. Jinja would print a list: no template means that.
fn soft_text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Undefined => Ok(String::new()),
        kind => Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} is trimmed, must be text"))),
    }
}

/// Python's methods: those of `pycompat`, with Python's idea of a space.
fn methods(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let (Some(text), "strip" | "lstrip" | "rstrip") = (value.as_str(), method)
        && arguments.len() <= 1
    {
        let what = arguments.first().and_then(Value::as_str);
        if arguments.is_empty() || what.is_some() {
            let kept = strip_as_python(text, what, method != "rstrip", method != "lstrip");
            return Ok(Value::from(kept));
        }
    }
    unknown_method_callback(state, value, method, arguments)
}

/// `json.dumps` of Python, as transformers' `tojson`.
// Values and options come to a filter by value.
#[allow(clippy::needless_pass_by_value)]
fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if let Some(width) = indent.filter(|width| *width > MAX_INDENT) {
        let cause = format!("`tojson` with an indent of {width}, must be at most {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, cause));
    }
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let default = if indent.is_some() { [",", ": "] } else { [", ", ": "] };
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        _ => default.map(ToOwned::to_owned),
    };
    let style = JsonStyle {
        indent,
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
        item,
        key,
    };
    let mut text = String::new();
    style.write(&mut text, &value, 0)?;
    Ok(Value::from_safe_string(text))
}

/// How `tojson` writes.
struct JsonStyle {
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
    item: String,
    key: String,
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > 64 {
            return Err(Error::new(ErrorKind::InvalidOperation, "`tojson` of more than 64 levels"));
        }
        match value.kind() {
            ValueKind::Undefined => {
                return Err(Error::new(ErrorKind::UndefinedError, "`tojson` of what is not there"));
            }
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&python_text(value)),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let write = |out: &mut String, key: &Value| {
                    self.text(out, &key.to_string());
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                };
                self.list(out, ['{', '}'], &keys, depth, write)?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            _ => self.text(out, &value.to_string()),
        }
        Ok(())
    }

    fn list(
        &self,
        out: &mut String,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(width) = self.indent
                && !items.is_empty()
            {
                out.push('\n');
                out.push_str(&" ".repeat(width.min(16) * depth));
            }
        };
        out.push(brackets[0]);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            line(out, depth + 1);
            write(out, item)?;
        }
        line(out, depth);
        out.push(brackets[1]);
        Ok(())
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A value as Python's `str` has it: the engine's own words, but for numbers with a point.
fn python_text(value: &Value) -> String {
    // Inside a list a text stands in quotes.
    let inside = |item: &Value| match item.kind() {
        ValueKind::String => {
            let list = Value::from(vec![item.clone()]).to_string();
            list[1..list.len() - 1].to_owned()
        }
        _ => python_text(item),
    };
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), python_float)
        }
        ValueKind::Seq => format!("[{}]", items().map(|item| inside(&item)).collect::<Vec<_>>().join(", ")),
        ValueKind::Map => {
            let pair = |key: Value| {
                let of_key = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", inside(&key), inside(&of_key))
            };
            format!("{{{}}}", items().map(pair).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// A number as Python's `repr` has it: with an exponent below 1e-4 and from 1e16 on.
fn python_float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if number.is_finite() && number != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

/// Kind, detail and line of a template's error.
pub(super) fn words(error: &Error) -> String {
    let cause = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    match error.line() {
        Some(line) => format!("line {line}: {cause}"),
        None => cause,
    }
}

/// The source with `{% generation %}` and its end as a filter block, which Jinja spaces alike; whether there is one.
pub(super) fn generation_as_filter(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len() + 32);
    let (mut rest, mut has_generation, mut is_raw) = (source, false, false);
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let close = match from.as_bytes().get(1) {
            Some(b'%') => "%}",
            Some(b'{') if !is_raw => "}}",
            Some(b'#') if !is_raw => "#}",
            _ => "",
        };
        let length = if close.is_empty() { 1 } else { tag_length(from, close) };
        let (tag, after) = from.split_at(length);
        rest = after;
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']);
        let word = if close == "%}" { inner.trim() } else { "" };
        match word {
            "raw" => is_raw = true,
            "endraw" => is_raw = false,
            "generation" if !is_raw => {
                has_generation = true;
                out.push_str(&tag.replacen("generation", "filter dflop_generation", 1));
                continue;
            }
            "endgeneration" if !is_raw => {
                out.push_str(&tag.replacen("endgeneration", "endfilter", 1));
                continue;
            }
            _ => {}
        }
        out.push_str(tag);
    }
    out.push_str(rest);
    (out, has_generation)
}

/// Bytes of the tag that `from` begins with, its end included; quoted text does not end it, save in a comment.
fn tag_length(from: &str, close: &str) -> usize {
    let mut quote = None;
    let mut is_escaped = false;
    for (at, c) in from.char_indices().skip(2) {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if c == '\\' => is_escaped = true,
            Some(open) if c == open => quote = None,
            None if (c == '"' || c == '\'') && close != "#}" => quote = Some(c),
            None if from[at..].starts_with(close) => return at + close.len(),
            _ => {}
        }
    }
    from.len()
}
