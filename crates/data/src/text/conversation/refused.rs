//! What is refused, as the conversation would be another one without it.

use super::*;
use serde_json::json;

#[test]
fn what_would_be_left_out_is_named() {
    let turns = |turn: Value| json!({"messages": [turn]});
    let user = |content: Value| turns(json!({"role": "user", "content": content}));
    let broken = [
        turns(json!({"role": "assistant", "content": "x", "weight": 0.5})),
        turns(json!({"role": "toolbox", "content": "x"})),
        turns(json!({"role": "user", "content": null})),
        json!({"system": "a", "messages": [{"role": "system", "content": "b"}]}),
        user(json!([{"texts": "x"}])),
        user(json!([{"text": "x", "image": "a"}])),
        user(json!([{"type": "box"}])),
        user(json!([{"type": "text"}])),
        user(json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,A!"}}])),
        user(json!([{"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}])),
        user(json!([{"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}])),
        user(json!([{"type": "image", "image": "a", "url": "b"}])),
        user(json!([{"type": "image"}])),
        user(json!([{"type": "image", "image": "a"}, {"type": "text", "text": "<image>"}])),
        turns(json!({"role": "assistant", "content": [{"type": "image", "image": "a"}]})),
        json!({"image": {"bytes": "AA"}, "caption": "x"}),
        json!({"image": {"size": 3}, "caption": "x"}),
        json!({"caption": "x"}),
        json!({"image": "a", "caption": "x", "text": "y"}),
        json!({"question": "x"}),
        json!({"question": "x", "answer": 3}),
        json!({"question": "x", "answer": "y", "label": "z"}),
        json!({"question": "x", "choices": ["y"], "answer": "z"}),
        json!({"images": ["a", "b"], "question": "<image> x", "answer": "z"}),
        json!({"question": "x", "input": "y", "answer": "z"}),
        json!({"query": "x", "history": "y", "response": "z"}),
        json!({"query": "x", "history": [["y"]], "response": "z"}),
        json!({"images": ["a"], "texts": [{"user": "x", "assistant": "y"}, "z"]}),
        json!({"texts": []}),
        json!({"texts": [{"user": "x"}]}),
        json!({"prompt": [{"role": "assistant", "content": "x"}], "completion": []}),
        json!({"prompt": [{"role": "user", "content": "x"}], "completion": "y"}),
        json!({"prompt": "x"}),
        json!({"prompt": "x", "answer": "y", "label": "z"}),
        turns(json!({"role": "assistant", "content": "x", "loss": "no"})),
        json!({"instruction": "x", "context": "y", "response": "z"}),
        json!({"question": "x", "hint": "y", "answer": "z"}),
        json!({"messages": "[{\"role\": \"user\"}]"}),
        json!({"audio": {"array": [0.5], "sampling_rate": 16000}, "caption": "x"}),
        user(json!([{"type": "image", "source": {"type": "base64", "data": "QQ=="}}])),
        json!({"images": ["a"], "messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}),
    ];
    let errors: Vec<_> = broken.iter().map(|record| Conversation::parse(record).unwrap_err()).collect();
    insta::assert_snapshot!(errors.join("\n"), @r#"
    `messages[0].weight` is 0.5, must be 0 or 1: an answer carries loss, or it does not
    `messages[0].role`: `toolbox`, must be human, gpt, user, assistant, system or tool
    `messages[0]`: `value` or `content` is missing
    `messages[0]` is a system turn, and `system` is there too
    `messages[0].content[0]`: `type` is missing, and no `text`, `image`, `video` or `audio` is there
    `messages[0].content[0]`: both `text` and `image` are there, and no `type` says which it is
    `messages[0].content[0].type`: `box`, must be text, image, video or audio
    `messages[0].content[0]`: `text` is missing
    `messages[0].content[0].image_url.url`: it is not base64: Invalid symbol 33, offset 1.
    `messages[0].content[0].image_url.url`: a `data:` URL without `;base64,`, must have it
    `messages[0].content[0].input_audio`: bytes in text, must be a path, a URL or `data` in base64
    `messages[0].content[0]`: both `image` and `url` are there
    1 `<image>` in the turns, but 0 under `image`: must be as many
    `messages` has media as parts and as marks in texts, must have them one way
    `<image>` stands in an assistant's turn, must stand in a question
    `image`: bytes in text, must be a path, a URL or `data` in base64
    `image`: an object without `path`, `url`, `bytes` or `data`
    `conversations` or `messages` is missing: the record has `caption`
    both `caption` and `text` are there
    `question` is there, but no `answer`
    `answer`: a number, must be text
    both `answer` and `label` are there
    `choices` stands beside `question`, must be part of it: it would be left out (`ignore: [choices]` in the mixture leaves it out)
    1 `<image>` in the turns, but 2 under `image`: must be as many
    `input` stands beside `question`, must be part of it: it would be left out (`ignore: [input]` in the mixture leaves it out)
    `history`: text, must be a list of pairs
    `history[0]`: a list, must be a list of a question and its answer
    `texts[1]`: text, must be an object with `user` and `assistant`
    `texts` is empty, at least one question is needed
    `texts[0]`: `assistant` is missing
    `completion`: a list, must be a list with an answer
    `completion`: text, must be a list with an answer
    `conversations` or `messages` is missing: the record has `prompt`
    both `answer` and `label` are there
    `messages[0].loss` is "no", must be 0 or 1: an answer carries loss, or it does not
    `context` stands beside `instruction`, must be part of it: it would be left out (`ignore: [context]` in the mixture leaves it out)
    `hint` stands beside `question`, must be part of it: it would be left out (`ignore: [hint]` in the mixture leaves it out)
    `messages`: text, must be a list of turns; it looks like JSON in a text: parse it before it is written
    `audio`: decoded sound (`array` and `sampling_rate`) is not read: store the file, for example by `cast_column("audio", Audio(decode=False))` before the dataset is written
    `messages[0].content[0].source` is not read: give `image`, `image_url`, `url` or `path`
    1 image in the parts of turns, and 1 more under `image` or `images`: must be in one place
    "#);
}

#[test]
fn tools_that_cannot_be_read_are_named() {
    let turn = |turn: Value| json!({"messages": [turn]});
    let broken = [
        json!({"tools": [3], "messages": [{"role": "user", "content": "x"}]}),
        json!({"tool_calls": [{"name": "f"}], "messages": [{"role": "user", "content": "x"}]}),
        turn(json!({"role": "user", "content": "x", "tools": [{"name": "f"}]})),
        turn(json!({"role": "assistant", "content": "x", "tool_calls": [{}]})),
        turn(json!({"role": "assistant", "content": "x", "tool_calls": "call f"})),
        turn(json!({"role": "user", "content": "x", "tool_calls": [{"name": "f", "arguments": {}}]})),
        turn(json!({"role": "tool_call", "content": "f()"})),
        turn(json!({"role": "tool_call", "content": {"name": "f"}})),
        turn(
            json!({"role": "tool_call", "content": "{\"name\": \"f\", \"arguments\": {\"wei\": 1000000000000000000001}}"}),
        ),
        json!({"tools": [{"name": "f"}], "text": "x"}),
    ];
    let broken = broken.map(|record| Conversation::parse(&record).unwrap_err());
    insta::assert_snapshot!(broken.join("\n"), @"
    `tools[0]`: a number, must be an object
    `tool_calls` stands beside the turns, must stand in the turn that calls
    `messages[0].tools` is there, tools must stand beside the turns
    `messages[0].tool_calls`: an object, must be a call: an object with a `name`
    `messages[0].tool_calls`: text, must be a list, or JSON of one in a text
    `messages[0]` is a user turn with calls of tools, must be the assistant's
    `messages[0].content`: text, must be a list, or JSON of one in a text
    `messages[0].content`: a call without `arguments`, must have them (`{}` where there are none)
    `messages[0].content` holds the number 1e21, must be below 2^63, or text
    `tools` stand beside `text` of a document, which nobody calls
    ");
}
