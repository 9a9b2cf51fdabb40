//! Lists in pages: by age and id, so that nothing is missed or comes twice while others are made and deleted.

use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiError;

const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

#[derive(Debug, Default, Deserialize)]
pub(super) struct PageQuery {
    limit: Option<String>,
    cursor: Option<String>,
}

/// Where an item stands among the others.
pub(super) type Position = (i128, String);

impl PageQuery {
    /// The page of these items; each comes with where it stands.
    pub(super) fn of(&self, mut items: Vec<(Position, Value)>) -> Result<Value, ApiError> {
        let limit = match self.limit.as_deref().map(str::parse) {
            None => DEFAULT_LIMIT,
            Some(Ok(limit)) if (1..=MAX_LIMIT).contains(&limit) => limit,
            Some(_) => return Err(ApiError::bad(format!("limit: 1 to {MAX_LIMIT}."))),
        };
        if let Some(cursor) = &self.cursor {
            let bad = || ApiError::bad("cursor: send the next_cursor of the page before as it is.");
            let (time, id) = cursor.split_once('.').ok_or_else(bad)?;
            let after: Position = (time.parse().map_err(|_| bad())?, id.to_owned());
            items.retain(|(position, _)| *position > after);
        }
        items.sort_by(|(one, _), (other, _)| one.cmp(other));
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|((time, id), _)| format!("{time}.{id}"));
        let items: Vec<Value> = items.into_iter().map(|(_, item)| item).collect();
        Ok(json!({ "items": items, "next_cursor": next }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_together_are_the_list() {
        let all: Vec<(Position, Value)> = (0..7).rev().map(|n| ((n / 2, format!("id-{n}")), json!(n))).collect();
        let mut found = Vec::new();
        let mut cursor = None;
        loop {
            let page = PageQuery { limit: Some("3".to_owned()), cursor: cursor.clone() }.of(all.clone()).unwrap();
            found.extend(page["items"].as_array().unwrap().clone());
            cursor = page["next_cursor"].as_str().map(str::to_owned);
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(json!(found), json!([0, 1, 2, 3, 4, 5, 6]));
    }

    #[test]
    fn a_bad_page_is_refused() {
        for (limit, cursor) in [(Some("0"), None), (Some("1001"), None), (Some("x"), None), (None, Some("x")), (None, Some("x.y"))] {
            let query = PageQuery { limit: limit.map(str::to_owned), cursor: cursor.map(str::to_owned) };
            assert!(query.of(Vec::new()).is_err(), "{query:?}");
        }
    }
}
