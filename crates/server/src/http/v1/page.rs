//! Lists in pages: by age and id, so that nothing is missed or comes twice while others are made and deleted.

use serde::Deserialize;
use utoipa::IntoParams;

use super::{ApiError, objects::List};

const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PageQuery {
    /// How many at most; 100 if left out.
    #[param(value_type = Option<u32>, minimum = 1, maximum = 1000, nullable = false)]
    limit: Option<String>,
    /// The `next_cursor` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// Where an item stands among the others.
pub(super) type Position = (i128, String);

impl PageQuery {
    /// The page of these items; each comes with where it stands.
    pub(super) fn of<T>(&self, mut items: Vec<(Position, T)>) -> Result<List<T>, ApiError> {
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
        Ok(List { items: items.into_iter().map(|(_, item)| item).collect(), next_cursor: next, warnings: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_together_are_the_list() {
        let all: Vec<(Position, i128)> = (0..7).rev().map(|n| ((n / 2, format!("id-{n}")), n)).collect();
        let mut found = Vec::new();
        let mut cursor = None;
        loop {
            let page = PageQuery { limit: Some("3".to_owned()), cursor: cursor.clone() }.of(all.clone()).unwrap();
            found.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_bad_page_is_refused() {
        for (limit, cursor) in [(Some("0"), None), (Some("1001"), None), (Some("x"), None), (None, Some("x")), (None, Some("x.y"))] {
            let query = PageQuery { limit: limit.map(str::to_owned), cursor: cursor.map(str::to_owned) };
            assert!(query.of::<()>(Vec::new()).is_err(), "{query:?}");
        }
    }
}
