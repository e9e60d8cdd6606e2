//! Tools: those that a conversation may call, its calls, and who says what they gave.
//!
//! A call becomes what chat templates read, `{"type": "function", "function": {"name", "arguments"}}`. Arguments that are
//! JSON in a text become the object, as servers read them before they render a template: a template writes them as JSON,
//! and would write a text in quotes.

use super::{Role, Said, field, type_of};
use serde_json::{Map, Value, json};

/// Of a record.
const TOOLS: &str = "tools";
/// Of a turn.
pub(crate) const CALLS: &str = "tool_calls";
/// Of a turn, one call: `OpenAI`'s older form.
const CALL: &str = "function_call";
pub(super) const FIELDS: [&str; 3] = [TOOLS, CALLS, CALL];
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
    if !is_used(record, TOOLS) {
        return Ok(Vec::new());
    }
    list(TOOLS, &record[TOOLS])?
        .into_iter()
        .enumerate()
        .map(|(index, tool)| {
            // Some datasets have each as JSON in a text.
            let tool = parsed(tool);
            if !tool.is_object() {
                return Err(format!("`{TOOLS}[{index}]`: {}, must be an object", type_of(&tool)));
            }
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

/// Adds the calls that a turn of a caller says: to the answer before them, where there is one, as trainers do.
///
/// # Errors
/// What is wrong: field, value, rule.
pub(super) fn call(
    said: &mut Vec<Said>,
    place: &str,
    content: &Value,
    is_learnt: bool,
) -> Result<(), String> {
    let calls = calls(place, content)?;
    let is_its_answer = |last: &Said| last.role == Role::Assistant && last.is_learnt == is_learnt;
    if !said.last().is_some_and(is_its_answer) {
        said.push(Said { is_learnt, ..Said::plain(Role::Assistant, Vec::new()) });
    }
    if let Some(answer) = said.last_mut() {
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
            let mut call = under_function(call);
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

/// What a text holds where it is JSON, as it is where it is none.
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
    let said = ["name", "arguments"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), fields.shift_remove(name)?)));
    let function: Map<String, Value> = said.collect();
    fields.entry("type").or_insert_with(|| json!("function"));
    fields.insert("function".to_owned(), Value::Object(function));
    call
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
