//! Tests of this module.

use super::*;
use serde_json::json;

const CHATML: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";

fn open(source: &str) -> ChatTemplate {
    let placeholders = [Some("<image>".to_owned()), None, None];
    ChatTemplate::new(source, &[("bos_token".to_owned(), "<s>".to_owned())], placeholders).unwrap()
}

fn refused(source: &str) -> String {
    ChatTemplate::new(source, &[], [None, None, None]).unwrap_err()
}

fn conversation(turns: &[(&str, &str)]) -> Conversation {
    let images = turns.iter().map(|(_, text)| text.matches("<image>").count()).sum();
    let turns: Vec<_> = turns.iter().map(|(role, text)| json!({"from": role, "value": text})).collect();
    let images = vec!["a.png"; images];
    Conversation::parse(&json!({"images": images, "conversations": turns})).unwrap()
}

fn answers(source: &str, turns: &[(&str, &str)]) -> (String, Vec<String>) {
    let rendered = open(source).render(&conversation(turns)).unwrap();
    let answers = rendered.answers.iter().map(|span| rendered.text[span.clone()].to_owned()).collect();
    (rendered.text, answers)
}

const TALK: [(&str, &str); 4] =
    [("human", "<image>\nwhat?"), ("gpt", " a cup \n"), ("human", "red?"), ("gpt", "")];

#[test]
fn a_template_of_texts_gets_placeholders_in_the_text() {
    let (text, answers) = answers(CHATML, &TALK);
    assert_eq!(
        text,
        "<|im_start|>user\n<image>\nwhat?<|im_end|>\n<|im_start|>assistant\n a cup \n<|im_end|>\n\
         <|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    );
    assert_eq!(answers, [" a cup \n", ""]);
}

#[test]
fn a_template_of_lists_gets_lists() {
    let lists = "{{ bos_token }}{% for m in messages %}{{ m.role.upper() }}: {% for p in m.content %}\
        {% if p.type == 'image' %}[<image>]{% else %}{{ p.text }}{% endif %}{% endfor %}</s>{% endfor %}";
    let (text, answers) = answers(lists, &TALK);
    assert_eq!(text, "<s>USER: [<image>]\nwhat?</s>ASSISTANT:  a cup \n</s>USER: red?</s>ASSISTANT: </s>");
    assert_eq!(answers, [" a cup \n", ""]);
    // Pixtral's way: lists from the user alone.
    let mixed = "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}\
        {% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}\
        {% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}";
    let (text, _) = self::answers(mixed, &[("system", "be calm"), TALK[0], TALK[1]]);
    assert_eq!(text, "[be calm]<image>\nwhat?[ a cup \n]");
}

#[test]
fn a_template_that_trims_is_followed() {
    let trims = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let (text, answers) = answers(trims, &TALK);
    assert_eq!(
        text,
        "<|user|><image>\nwhat?<|end|><|assistant|>a cup<|end|><|user|>red?<|end|><|assistant|><|end|>"
    );
    assert_eq!(answers, ["a cup", ""]);
}

/// Mistral 7B 0.3: answers are trimmed, and the system's words go into the last question, so that no rendering of fewer
/// turns is a beginning of the whole.
#[test]
fn a_template_that_trims_and_moves_turns_is_followed() {
    let moves = "{% set system = messages[0].content if messages[0].role == 'system' else '' %}\
        {% for m in messages %}{% if m.role == 'user' %}[{% if loop.last %}{{ system }}{% endif %}{{ m.content }}]\
        {% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}";
    let turns = [("system", "calm"), ("human", "a"), ("gpt", " b \n"), ("human", "c"), ("gpt", "  ")];
    let (text, answers) = answers(moves, &[&turns[..], &[("human", "d")]].concat());
    assert_eq!(text, "[a] b</s>[c] </s>[calmd]");
    assert_eq!(answers, ["b", ""]);
}

#[test]
fn an_answer_that_is_rewritten_is_refused() {
    let shouts = "{% for m in messages %}{% if m.role == 'assistant' and m.content.startswith('a') %}\
        {{ m.content.upper() }}{% else %}{{ m.content }}{% endif %}|{% endfor %}";
    let template = open(&shouts.replace("startswith('a')", "startswith('b')"));
    assert_eq!(template.render(&conversation(&[("human", "x"), ("gpt", "a")])).unwrap().answers[0], 2..3);
    let error = template.render(&conversation(&[("human", "x"), ("gpt", "b")])).unwrap_err();
    assert!(
        error.starts_with("the answer of turn 1 is not found in what the chat template writes"),
        "{error}"
    );
}

#[test]
fn generation_tags_are_the_answers() {
    let tags = "{% for m in messages %}\n  {%- if m.role == 'assistant' %}\n    {% generation %}\n{{ m.content }}|\
        {%- endgeneration %}\n  {%- else %}{# {% generation %} #}{{ m.content }}{{ '{% generation %}' }}\
        {% endif %}\n{% endfor %}";
    let (text, answers) = answers(tags, &TALK[1..3]);
    assert_eq!(text, " a cup \n|red?{% generation %}");
    assert_eq!(answers, [" a cup \n|"]);
}

#[test]
fn what_a_template_may_not_is_named() {
    assert!(refused("{% for %}").starts_with("the chat template does not parse: line 1: "));
    assert!(refused("{{ messages[0].content[0] }}").contains("writes 0 of 2 turns"));
    assert!(refused("{{ strftime_now('%d') }}").contains("it asks for the date"));
    assert!(refused("{{ raise_exception('no talk') }}").ends_with("the chat template: line 1: no talk"));
    assert!(refused("{{ 1|tojson(indent=65) }}").ends_with("an indent of 65, must be at most 64"));
    let alternates = format!(
        "{{% if messages[0].role == 'assistant' %}}{{{{ raise_exception('ask') }}}}{{% endif %}}{CHATML}"
    );
    let error = open(&alternates).render(&conversation(&[("gpt", "x")])).unwrap_err();
    assert_eq!(error, "the chat template: line 1: ask");
    let video = json!({"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>"}]});
    let error = open(CHATML).render(&Conversation::parse(&video).unwrap()).unwrap_err();
    assert_eq!(error, "the model's family reads no video");
    let reserved = conversation(&[("gpt", "a\u{fdd1}b")]);
    assert_eq!(
        open(CHATML).render(&reserved).unwrap_err(),
        "a turn holds a character of U+FDD0 to U+FDE1, must not"
    );
}

/// Python 3.11, e with an acute: `json.dumps({"b": "<e>\n", "a": [1, True, None, {}]}, ensure_ascii=False)`, and so on.
#[test]
fn json_is_that_of_python() {
    let json = |call: &str| {
        let source = format!("{{{{ {{'b': '<\u{e9}>\\n', 'a': [1, true, none, {{}}]}} | {call} }}}}{CHATML}");
        let text = open(&source).render(&conversation(&[("human", "x")])).unwrap().text;
        text.split("<|im_start|>").next().unwrap().to_owned()
    };
    assert_eq!(json("tojson"), "{\"b\": \"<\u{e9}>\\n\", \"a\": [1, true, null, {}]}");
    assert_eq!(
        json("tojson(ensure_ascii=true, sort_keys=true)"),
        r#"{"a": [1, true, null, {}], "b": "<\u00e9>\n"}"#
    );
    assert_eq!(
        json("tojson(indent=2)"),
        "{\n  \"b\": \"<\u{e9}>\\n\",\n  \"a\": [\n    1,\n    true,\n    null,\n    {}\n  ]\n}"
    );
}

/// Thoughts of the answers behind the last question, calls of tools, and what they gave.
const CALLS_AND_THOUGHTS: &str = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.role == 'assistant' %}{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}\
    {{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}\
    {% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}\
    {% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn spans(template: &ChatTemplate, record: &Value) -> Result<Vec<String>, String> {
    let rendered = template.render(&Conversation::parse(record)?)?;
    Ok(rendered.answers.iter().map(|span| rendered.text[span.clone()].to_owned()).collect())
}

fn with_tools() -> Value {
    json!({"images": ["a.png"], "tools": [{"name": "look"}], "messages": [
        {"role": "user", "content": "hm?"},
        {"role": "assistant", "content": "oh", "reasoning_content": "left out"},
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "reasoning_content": " I look \n", "tool_calls": [
            {"function": {"name": "look", "arguments": {"b": 1e-5, "a": "\u{e9}"}}}, {"function": {"name": "zoom", "arguments": {}}}]},
        {"role": "tool", "content": "here <image>"},
        {"role": "assistant", "content": "there", "reasoning_content": "so"}]})
}

#[test]
fn thoughts_and_calls_belong_to_the_answer() {
    let expected = [
        "oh",
        "<think>\nI look\n</think>\n\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"b\": 1e-05, \"a\": \"\u{e9}\"}}\n</tool_call>\
         <tool_call>\n{\"name\": \"zoom\", \"arguments\": {}}\n</tool_call>",
        "<think>\nso\n</think>\n\nthere",
    ];
    let template = open(CALLS_AND_THOUGHTS);
    assert_eq!(spans(&template, &with_tools()).unwrap(), expected);
    let text = template.render(&Conversation::parse(&with_tools()).unwrap()).unwrap().text;
    assert!(
        text.starts_with(
            "<|im_start|>system\n{\"type\": \"function\", \"function\": {\"name\": \"look\"}}\n<|im_end|>\n"
        ),
        "{text}"
    );
    assert!(text.contains("<|im_start|>tool\nhere <image><|im_end|>"), "{text}");
    // A generation prompt that opens the thoughts: they begin behind it.
    let opens = CALLS_AND_THOUGHTS
        .replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}");
    assert_eq!(spans(&open(&opens), &with_tools()).unwrap(), expected);
    // Where no turn has an end of its own, only what the template writes up to it tells where calls end.
    let endless = CALLS_AND_THOUGHTS.replace("<|im_end|>\n{% endfor %}", "{% endfor %}");
    let mut one_question = with_tools();
    one_question["messages"].as_array_mut().unwrap().drain(..2);
    assert_eq!(spans(&open(&endless), &one_question).unwrap(), expected[1..]);
}

/// Thoughts inside the content, which the template takes out of earlier answers.
#[test]
fn thoughts_within_a_content_are_found() {
    let takes_out = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and not loop.last %}\
        {{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}",
    );
    let think = |thought: &str, answer: &str| format!("<think>\n{thought}\n</think>\n\n{answer}");
    let talk = [("human", "a"), ("gpt", &think("b", "c")), ("human", "d"), ("gpt", &think("e", "f"))];
    let (_, found) = answers(&takes_out, &talk);
    assert_eq!(found, ["c", think("e", "f").as_str()]);
    let (_, found) = answers(CHATML, &talk);
    assert_eq!(found, [think("b", "c"), think("e", "f")]);
}

#[test]
fn tools_that_a_template_does_not_write_are_refused() {
    let template = open(CHATML);
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut record = with_tools();
        change(&mut record);
        spans(&template, &record).unwrap_err()
    };
    assert_eq!(refused(&|_| {}), "the chat template writes no calls of tools: it does not read `tool_calls`");
    let no_calls = |record: &mut Value| {
        record["messages"][3].as_object_mut().unwrap().shift_remove("tool_calls");
    };
    assert_eq!(refused(&no_calls), "the chat template writes no `tools`, and the record has some");
    let strict = format!(
        "{{% for m in messages %}}{{% if m.role == 'tool' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}{CHATML}"
    );
    let error = spans(&open(&strict), &with_tools()).unwrap_err();
    assert_eq!(error, "the chat template writes no turns of tools");
}

/// Python 3.11: `str([0.5, "a'b", {"c": 1e-05, "d": None}, True])` and so on.
#[test]
fn values_are_printed_as_python_prints_them() {
    let shown = |value: &str| {
        let source = format!("{{{{ {value} }}}}|{{{{ ({value}) | string }}}}{CHATML}");
        let text = open(&source).render(&conversation(&[("human", "x")])).unwrap().text;
        let shown = text.split("<|im_start|>").next().unwrap().split_once('|').unwrap();
        assert_eq!(shown.0, shown.1);
        shown.0.to_owned()
    };
    assert_eq!(
        shown("[0.5, \"a\", {'c': 0.00001, 'd': none}, true]"),
        "[0.5, 'a', {'c': 1e-05, 'd': None}, True]"
    );
    assert_eq!(shown("12345678901234567890.0"), "1.2345678901234567e+19");
    assert_eq!((shown("3"), shown("2.0")), ("3".to_owned(), "2.0".to_owned()));
    assert_eq!(shown("none is iterable"), "False");
}

/// The end of the turn follows the answer, whatever spaces the answer ends with.
#[test]
fn spaces_behind_an_answer_with_thoughts_belong_to_it() {
    let template = open(CALLS_AND_THOUGHTS);
    let record = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b \n", "reasoning_content": "dropped"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d\n", "reasoning_content": "e"}]});
    assert_eq!(spans(&template, &record).unwrap(), ["b \n", "<think>\ne\n</think>\n\nd\n"]);
    let trims_at_the_start = CHATML.replace("{{ m.content }}", "{{ m.content.lstrip() }}");
    let (_, found) = answers(&trims_at_the_start, &[("human", "a"), ("gpt", "\n\nb\n")]);
    assert_eq!(found, ["b\n"]);
}

/// A template that names the called function once more where the tool speaks, and whose turns end in two ways.
#[test]
fn a_name_that_is_written_once_more_is_no_answer() {
    let names = "{% set ns = namespace(name='') %}{% for m in messages %}<|start|>\
        {% if m.role == 'tool' %}{{ ns.name }} to=assistant<|channel|>{{ m.content }}<|end|>\
        {% elif m.tool_calls %}assistant{% set ns.name = m.tool_calls[0].function.name %} to={{ ns.name }}<|channel|>json\
        <|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
        {% else %}{{ m.role }}<|message|>{{ m.content }}{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}{% endif %}\
        {% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let template = open(names);
    for given in ["", "a cup"] {
        let record = json!({"tools": [], "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": [1]}}]},
            {"role": "tool", "content": given},
            {"role": "assistant", "content": "b"}]});
        let found = spans(&template, &record).unwrap();
        // The token that ends the turn follows the answer.
        assert_eq!(found, [" to=look<|channel|>json<|message|>{\"at\": [1]}", "b"], "{given}");
    }
}

/// Turns without an end of their own, where the template leaves out the thoughts of earlier answers.
#[test]
fn calls_of_earlier_questions_are_found_without_an_end() {
    let endless = CALLS_AND_THOUGHTS.replace("<|im_end|>\n{% endfor %}", "{% endfor %}");
    let record = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "dropped", "tool_calls": [{"name": "look", "arguments": {}}]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": "f"}]});
    let call = "\n<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>";
    let found = spans(&open(&endless), &record).unwrap();
    assert_eq!(found, [call.trim_start(), "c", "<think>\nf\n</think>\n\ne"]);
}

#[test]
fn a_picture_that_a_template_of_texts_would_write_bare_is_refused() {
    let template = open(
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}\
        {% if p.type == 'image' %}[<image>]{% else %}{{ p.text }}{% endif %}{% endfor %}{% else %}{{ m.content }}{% endif %}\
        {% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}",
    );
    let error = spans(&template, &with_tools()).unwrap_err();
    assert_eq!(error, "the chat template writes what a tool gave as text, and the record has a medium in it");
}
