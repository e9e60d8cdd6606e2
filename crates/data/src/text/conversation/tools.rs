//! Tools: which ones a conversation may call, the calls in it, and the turns with their results.
//!
//! A call becomes what chat templates read, `{"type": "function", "function": {"name", "arguments"}}`. Arguments that are
//! JSON in a text become the object, as servers read them before they render a template: a template writes them as JSON,
//! and would write a text in quotes.

use super::{Piece, Role, Said, field, type_of};
use serde_json::{Map, Value, json};

/// Of a record.
const TOOLS: &str = "tools";
/// Of a record, in `OpenAI`'s older form.
const FUNCTIONS: &str = "functions";
/// Of a turn.
pub(crate) const CALLS: &str = "tool_calls";
/// Of a turn, one call: `OpenAI`'s older form.
const CALL: &str = "function_call";
pub(super) const FIELDS: [&str; 4] = [TOOLS, FUNCTIONS, CALLS, CALL];
/// Whole numbers from here on do not fit into 64 bits.
const LARGE: f64 = 9_223_372_036_854_775_808.0;
/// What closes a thought before the calls of a turn that is JSON (LLaMA-Factory).
const THOUGHT_END: &str = "</think>";
/// Who says what a tool gave.
pub(super) const SPEAKERS: [&str; 5] = ["tool", "function", "observation", "tool_response", "ipython"];
/// Speakers of turns whose text is a call, or a list of them, in JSON (LLaMA-Factory, ms-swift).
const CALLERS: [&str; 2] = ["function_call", "tool_call"];

/// The tools of a record.
///
/// # Errors
/// What is wrong: field, value, rule.
pub(super) fn of_record(record: &Value) -> Result<Vec<Value>, String> {
    if let Some(name) = [CALLS, CALL].into_iter().find(|name| is_used(record, name)) {
        return Err(format!("`{name}` stands beside the turns, must stand in the turn that calls"));
    }
    let name = match [TOOLS, FUNCTIONS].map(|name| is_used(record, name)) {
        [false, false] => return Ok(Vec::new()),
        [true, true] => return Err(format!("both `{TOOLS}` and `{FUNCTIONS}` are there")),
        [has_tools, _] => [FUNCTIONS, TOOLS][usize::from(has_tools)],
    };
    list(name, &record[name])?
        .into_iter()
        .enumerate()
        .map(|(index, tool)| {
            // Some datasets have each as JSON in a text.
            let tool = parsed(tool);
            if !tool.is_object() {
                return Err(format!("`{name}[{index}]`: {}, must be an object", type_of(&tool)));
            }
            refuse_large(&format!("{name}[{index}]"), &tool)?;
            let is_bare = tool.get("type").is_none() && tool.get("function").is_none();
            Ok(if is_bare { json!({"type": "function", "function": tool}) } else { tool })
        })
        .collect()
}

/// The calls of a turn.
///
/// # Errors
/// What is wrong: field, value, rule.
pub(super) fn of_turn(place: &str, turn: &Value) -> Result<Vec<Value>, String> {
    if is_used(turn, TOOLS) {
        return Err(format!("`{place}.{TOOLS}` is there, tools must stand beside the turns"));
    }
    match [CALLS, CALL].map(|name| is_used(turn, name)) {
        [false, false] => Ok(Vec::new()),
        [true, true] => Err(format!("`{place}`: both `{CALLS}` and `{CALL}` are there")),
        [true, false] => calls(&format!("{place}.{CALLS}"), &turn[CALLS]),
        [false, true] => calls(&format!("{place}.{CALL}"), &turn[CALL]),
    }
}

/// Whether turns of this speaker are calls.
pub(super) fn is_caller(speaker: &str) -> bool {
    CALLERS.contains(&speaker)
}

/// Adds the calls that a turn of a caller says, and its further fields: to the answer before them, where there is one, as
/// trainers do.
///
/// # Errors
/// What is wrong: field, value, rule.
pub(super) fn call(said: &mut Vec<Said>, place: &str, content: &Value, turn: Said) -> Result<(), String> {
    // A thought stands before the calls.
    let text = content.as_str().unwrap_or_default();
    let (thought, called) = match text.rfind(THOUGHT_END) {
        Some(at) => (&text[..at + THOUGHT_END.len()], &Value::from(&text[at + THOUGHT_END.len()..])),
        None => ("", content),
    };
    let calls = calls(place, called)?;
    let has_more = |fields: &Map<String, Value>| fields.keys().any(|name| name != CALLS);
    let joins = |last: &Said| {
        last.role == Role::Assistant
            && last.is_learnt == turn.is_learnt
            && !(has_more(&turn.fields) && (has_more(&last.fields) || last.fields.contains_key(CALLS)))
            && (thought.is_empty() || last.pieces.is_empty())
    };
    if !said.last().is_some_and(joins) {
        said.push(Said::plain(Role::Assistant, Vec::new()));
    }
    if let Some(answer) = said.last_mut() {
        answer.is_learnt = turn.is_learnt;
        answer.fields.extend(turn.fields);
        if !thought.is_empty() {
            answer.pieces.push(Piece::Text(thought.to_owned()));
        }
        add(&mut answer.fields, calls);
    }
    Ok(())
}

/// Adds calls to a turn's.
pub(super) fn add(fields: &mut Map<String, Value>, calls: Vec<Value>) {
    if calls.is_empty() {
        return;
    }
    let list = fields.entry(CALLS).or_insert_with(|| json!([]));
    if let Some(list) = list.as_array_mut() {
        list.extend(calls);
    }
}

/// The function that a call or a tool names.
pub(super) fn name_of(call: &Value) -> Option<&str> {
    let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
    function.get("name").and_then(Value::as_str)
}

/// A call, or a list of them, as a value or as JSON in a text.
fn calls(place: &str, value: &Value) -> Result<Vec<Value>, String> {
    list(place, value)?
        .into_iter()
        .map(|call| {
            let call = parsed(call);
            if name_of(&call).is_none() {
                return Err(format!(
                    "`{place}`: {}, must be a call: an object with a `name`",
                    type_of(&call)
                ));
            }
            refuse_large(place, &call)?;
            let mut call = under_function(call);
            if call.pointer("/function/arguments").is_none() {
                return Err(format!(
                    "`{place}`: a call without `arguments`, must have them (`{{}}` where there are none)"
                ));
            }
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let object @ Value::Object(_) = parsed(arguments.clone())
            {
                *arguments = object;
            }
            Ok(call)
        })
        .collect()
}

/// What a list holds, and an object alone; either may be JSON in a text.
fn list(place: &str, value: &Value) -> Result<Vec<Value>, String> {
    match parsed(value.clone()) {
        Value::Array(list) => Ok(list),
        object @ Value::Object(_) => Ok(vec![object]),
        _ => Err(format!("`{place}`: {}, must be a list, or JSON of one in a text", type_of(value))),
    }
}

/// The value that a text says, where the text is JSON; any other value as it is.
fn parsed(value: Value) -> Value {
    match &value {
        Value::String(text) => serde_json::from_str(text).unwrap_or(value),
        _ => value,
    }
}

/// A call with its name and arguments under `function`, where templates look for them.
fn under_function(mut call: Value) -> Value {
    let Some(fields) = call.as_object_mut().filter(|fields| !fields.contains_key("function")) else {
        return call;
    };
    // Llama writes `parameters`.
    let named = [("name", "name"), ("arguments", "arguments"), ("parameters", "arguments")];
    let mut function = Map::new();
    for (theirs, ours) in named {
        if let Some(value) = fields.shift_remove(theirs) {
            function.entry(ours).or_insert(value);
        }
    }
    fields.entry("type").or_insert_with(|| json!("function"));
    fields.insert("function".to_owned(), Value::Object(function));
    call
}

/// Refuses whole numbers that are read as others: Python would write all their digits.
fn refuse_large(place: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(large) if number.is_f64() && large.fract() == 0.0 && large.abs() >= LARGE => {
                Err(format!("`{place}` holds the number {large:e}, must be below 2^63, or text"))
            }
            _ => Ok(()),
        },
        Value::Array(list) => list.iter().try_for_each(|value| refuse_large(place, value)),
        Value::Object(fields) => fields.values().try_for_each(|value| refuse_large(place, value)),
        _ => Ok(()),
    }
}

/// Whether the field is there and says something: tables have empty lists where a row has none.
fn is_used(record: &Value, name: &str) -> bool {
    let is_empty = |value: &Value| match value {
        Value::String(text) => ["", "[]", "null"].contains(&text.trim()),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    field(record, name).is_some_and(|value| !is_empty(value))
}
