//! Places of media among the turns: each has one medium, and each medium one.

use super::{MediaReference, MediaSource, Piece, Role, Said, Turn, TurnPart, Turns};
use crate::media::MediaKind;

/// Makes placeholders and media fit, or says why they do not.
pub(super) fn fill(turns: &mut Turns, listed: &[Vec<MediaSource>; 3]) -> Result<(), String> {
    for said in turns.said.iter().filter(|said| said.role == Role::Assistant) {
        if let Some(Piece::Placeholder { kind, .. }) =
            said.pieces.iter().find(|piece| !matches!(piece, Piece::Text(_)))
        {
            let mark = kind.mark();
            return Err(format!("`{mark}` stands in an assistant's turn, must stand in a question"));
        }
    }
    // Places without a name, by kind.
    let mut open = MediaKind::ALL.map(|kind| {
        let pieces = turns.said.iter().flat_map(|said| &said.pieces);
        pieces
            .filter(|piece| matches!(piece, Piece::Placeholder { kind: k, source: None } if *k == kind))
            .count()
    });
    let [images, videos, _] = listed.each_ref().map(Vec::len);
    if images == 0 && videos > 0 && open[1] == 0 && open[0] == videos {
        for piece in turns.said.iter_mut().flat_map(|said| &mut said.pieces) {
            if let Piece::Placeholder { kind: kind @ MediaKind::Image, source: None } = piece {
                *kind = MediaKind::Video;
            }
        }
        open = [0, videos, open[2]];
    }
    let num_listed: usize = listed.iter().map(Vec::len).sum();
    let has_placeholder = turns
        .said
        .iter()
        .flat_map(|said| &said.pieces)
        .any(|piece| matches!(piece, Piece::Placeholder { .. }));
    if !has_placeholder && (num_listed == 1 || turns.asks_with_all) {
        let kinds =
            MediaKind::ALL.into_iter().zip(listed).flat_map(|(kind, list)| list.iter().map(move |_| kind));
        let question = turns.said.iter_mut().find(|said| said.role == Role::User);
        match question {
            Some(question) => put_before(question, kinds, !turns.asks_with_all),
            None if num_listed == 0 => {}
            None => {
                let mark = kinds.map(MediaKind::mark).next().unwrap_or_default();
                return Err(format!("there is no question to put `{mark}` before"));
            }
        }
        open = listed.each_ref().map(Vec::len);
    }
    for (kind, (placeholders, list)) in MediaKind::ALL.into_iter().zip(open.iter().zip(listed)) {
        if *placeholders != list.len() {
            let (mark, key, media) = (kind.mark(), kind.as_str(), list.len());
            let is_own = |piece: &Piece| matches!(piece, Piece::Placeholder { kind: k, source: Some(_) } if *k == kind);
            let num_own =
                turns.said.iter().flat_map(|said| &said.pieces).filter(|piece| is_own(piece)).count();
            if num_own > 0 && *placeholders == 0 {
                return Err(format!(
                    "{num_own} {key} in the parts of turns, and {media} more under `{key}` or `{}`: must be in one place",
                    kind.plural()
                ));
            }
            return Err(format!(
                "{placeholders} `{mark}` in the turns, but {media} under `{key}`: must be as many"
            ));
        }
    }
    Ok(())
}

/// Puts placeholders before what is asked, each on a line of its own.
fn put_before(question: &mut Said, kinds: impl Iterator<Item = MediaKind>, breaks_line: bool) {
    let mut pieces = Vec::new();
    let breaks_line = breaks_line || !question.pieces.is_empty();
    for kind in kinds {
        pieces.push(Piece::Placeholder { kind, source: None });
        if breaks_line {
            pieces.push(Piece::Text("\n".to_owned()));
        }
    }
    if let (Some(Piece::Text(line)), Some(Piece::Text(first))) = (pieces.last(), question.pieces.first_mut())
    {
        first.insert_str(0, line);
        pieces.pop();
    }
    pieces.append(&mut question.pieces);
    question.pieces = pieces;
}

/// Gives the placeholders the names of the media, in order.
pub(super) fn name(
    turns: Turns,
    listed: [Vec<MediaSource>; 3],
) -> Result<(Vec<Turn>, Vec<MediaReference>), String> {
    let mut listed = listed.map(Vec::into_iter);
    let mut media = Vec::new();
    let mut named = Vec::with_capacity(turns.said.len());
    for said in turns.said {
        let mut parts = Vec::with_capacity(said.pieces.len());
        for piece in said.pieces {
            match piece {
                Piece::Text(text) => match parts.last_mut() {
                    Some(TurnPart::Text(before)) if said.role == Role::Assistant => before.push_str(&text),
                    _ => parts.push(TurnPart::Text(text)),
                },
                Piece::Placeholder { kind, source } => {
                    let mut next = || listed[kind.index()].next();
                    let source =
                        source.or_else(&mut next).ok_or_else(|| format!("one `{}` too many", kind.mark()))?;
                    parts.push(TurnPart::Media(media.len()));
                    media.push(MediaReference { source, kind });
                }
            }
        }
        named.push(Turn { role: said.role, parts, is_learnt: said.is_learnt, fields: said.fields });
    }
    Ok((named, media))
}
