//! Which fields of a turn a chat template reads, beside who speaks and what is said.

/// Names that templates give a turn, beside those of their loops.
const TURNS: [&str; 4] = ["message", "msg", "turn", "m"];

/// Whether the template of this source reads the field of a turn: `message.name`, `message['name']`, `message.get('name')`,
/// `'name' in message`, `messages[0].name`. A field of the same name in something else, as in `tool_call.name`, is not a turn's.
pub(super) fn reads(source: &str, field: &str) -> bool {
    let turns = turns_of(source);
    let is_turn = |name: &str| TURNS.contains(&name) || turns.contains(&name);
    source.match_indices(field).any(|(at, _)| {
        let (before, after) = (&source[..at], &source[at + field.len()..]);
        if before.ends_with(is_of_name) || after.starts_with(is_of_name) {
            return false;
        }
        let is_quoted = before.ends_with(['\'', '"']) && after.starts_with(['\'', '"']);
        let before = if is_quoted { &before[..before.len() - 1] } else { before };
        let owner = [".get(", "[", "."].into_iter().find_map(|mark| before.strip_suffix(mark));
        if let Some(owner) = owner.map(str::trim_end) {
            // What stands in brackets says which turn it is.
            let name = match owner.strip_suffix(']') {
                Some(inside) => last_name(inside.rsplit_once('[').map_or("", |(list, _)| list)),
                None => last_name(owner),
            };
            return is_turn(name) || owner.ends_with(']') && is_list(name);
        }
        let rest = after.get(1..).filter(|_| is_quoted).map(str::trim_start).unwrap_or_default();
        let rest = rest.strip_prefix("not ").unwrap_or(rest).trim_start();
        rest.strip_prefix("in ").is_some_and(|rest| is_turn(first_name(rest.trim_start())))
    })
}

/// The variables of loops over the turns.
fn turns_of(source: &str) -> Vec<&str> {
    let loops = source.match_indices("for ").filter_map(|(at, mark)| {
        let (name, list) = source[at + mark.len()..].trim_start().split_once(" in ")?;
        is_list(first_name(list.trim_start())).then(|| name.trim())
    });
    loops.filter(|name| !name.is_empty() && name.chars().all(is_of_name)).collect()
}

/// Templates copy the list of turns under names such as `loop_messages`.
fn is_list(name: &str) -> bool {
    name.ends_with("messages")
}

fn is_of_name(letter: char) -> bool {
    letter == '_' || letter.is_alphanumeric()
}

fn first_name(text: &str) -> &str {
    text.split(|letter| !is_of_name(letter)).next().unwrap_or_default()
}

fn last_name(text: &str) -> &str {
    text.rsplit(|letter| !is_of_name(letter)).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::reads;

    #[test]
    fn a_field_of_a_turn_is_told_from_others_of_its_name() {
        for source in [
            "{% for message in messages %}{{ message.name }}{% endfor %}",
            "{% for message in messages %}{{ message['name'] }}{% endfor %}",
            "{% for x in loop_messages %}{{ x[\"name\"] }}{% endfor %}",
            "{%- for x in messages[1:] %}{%- if x.get('name') %}a{% endif %}{% endfor %}",
            "{% for message in messages %}{% if 'name' in message %}a{% endif %}{% endfor %}",
            "{% for message in messages %}{% if 'name' not in message %}a{% endif %}{% endfor %}",
            "{{ messages[0].name }}",
            "{{ messages[loop.index0 - 1]['name'] }}",
        ] {
            assert!(reads(source, "name"), "{source}");
        }
        for source in [
            "{% for message in messages %}{% for tool_call in message.tool_calls %}{{ tool_call.name }}{% endfor %}{% endfor %}",
            "{% for message in messages %}{{ message.username }}{{ message.name_of }}{% endfor %}",
            "{% for part in message.content %}{{ part['name'] }}{% if 'name' in part %}a{% endif %}{% endfor %}",
            "{# the name of the message #}",
            "{{ tools[0].name }}",
        ] {
            assert!(!reads(source, "name"), "{source}");
        }
    }
}
