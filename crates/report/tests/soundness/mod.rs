//! What must hold for every page and figure, whatever they show.

#![allow(dead_code, reason = "each test file uses its part")]

use dflop_report::{Report, render};
use std::collections::BTreeSet;

/// The content of an element of raw text, taken out of a page.
pub(crate) fn without(page: &str, element: &str) -> String {
    let (open, close) = (format!("<{element}>"), format!("</{element}>"));
    let from = page.find(&open).unwrap() + open.len();
    let to = from + page[from..].find(&close).unwrap();
    format!("{}...{}", &page[..from], &page[to..])
}

/// The tags of a page as `(name, attributes)`, a closing one as `/name`; panics where a tag is broken.
fn tags(page: &str) -> Vec<(String, Vec<(String, String)>)> {
    let page = page.strip_prefix("<!DOCTYPE html>").unwrap_or(page);
    let mut tags = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "a stray `>` in {:?}", &rest[..at]);
        rest = &rest[at + 1..];
        let end = rest.find(|c: char| c == '>' || c.is_whitespace()).unwrap();
        let name = rest[..end].to_owned();
        rest = rest[end..].trim_start();
        let mut attributes = Vec::new();
        while !rest.starts_with('>') {
            let end = rest.find(['=', '>', ' ']).unwrap();
            let key = rest[..end].to_owned();
            assert!(
                !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
                "attribute {key:?}"
            );
            rest = &rest[end..];
            let mut value = String::new();
            if let Some(quoted) = rest.strip_prefix("=\"") {
                let end = quoted.find('"').unwrap();
                quoted[..end].clone_into(&mut value);
                rest = &quoted[end + 1..];
            }
            rest = rest.trim_start();
            attributes.push((key, value));
        }
        rest = &rest[1..];
        tags.push((name, attributes));
    }
    tags
}

/// Every tag is closed in order, ids are unique, links lead somewhere, and every coordinate is a number.
pub(crate) fn check(page: &str) {
    const VOID: [&str; 3] = ["meta", "link", "input"];
    const NUMBERS: [&str; 14] =
        ["x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height", "d", "viewBox"];
    let mut open: Vec<String> = Vec::new();
    let (mut ids, mut links) = (BTreeSet::new(), Vec::new());
    for (name, attributes) in tags(page) {
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closed out of order");
        } else if !VOID.contains(&name.as_str()) {
            open.push(name.clone());
        }
        for (key, value) in attributes {
            if key == "id" {
                assert!(ids.insert(value.clone()), "id {value:?} stands twice");
            }
            if let Some(target) = (key == "href").then_some(value.strip_prefix('#')).flatten() {
                links.push(target.to_owned());
            }
            if NUMBERS.contains(&key.as_str()) {
                let is_number = |c: char| {
                    c.is_ascii_digit() || " .-".contains(c) || (key == "d" && "MLahlvz".contains(c))
                };
                assert!(!value.is_empty() && value.chars().all(is_number), "{name} {key}={value:?}");
            }
            if ["width", "height", "r"].contains(&key.as_str()) {
                assert!(!value.starts_with('-'), "{name} {key}={value:?}");
            }
        }
    }
    assert_eq!(open, Vec::<String>::new(), "left open");
    for link in links {
        assert!(ids.contains(&link), "#{link} leads nowhere");
    }
    let words = page.split(|c: char| !c.is_ascii_alphanumeric());
    assert!(
        !words.clone().any(|w| ["NaN", "inf", "Infinity"].contains(&w)),
        "a number that is none is shown"
    );
}

/// What the page shows, without the style and the script that it shares with all pages.
pub(crate) fn shown(report: &Report) -> String {
    without(&without(&render(report), "style"), "script")
}
