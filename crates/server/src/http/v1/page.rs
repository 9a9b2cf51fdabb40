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
    pub(super) fn limit(&self) -> Result<usize, ApiError> {
        match self.limit.as_deref().map(str::parse) {
            None => Ok(DEFAULT_LIMIT),
            Some(Ok(limit)) if (1..=MAX_LIMIT).contains(&limit) => Ok(limit),
            Some(_) => Err(ApiError::bad(format!("limit: 1 to {MAX_LIMIT}."))),
        }
    }

    /// The last of the page before.
    pub(super) fn after(&self) -> Result<Option<Position>, ApiError> {
        let Some(cursor) = &self.cursor else { return Ok(None) };
        let (time, id) = cursor.split_once('.').ok_or_else(Self::bad_cursor)?;
        Ok(Some((time.parse().map_err(|_| Self::bad_cursor())?, id.to_owned())))
    }

    pub(super) fn bad_cursor() -> ApiError {
        ApiError::bad("cursor: send the next_cursor of the page before as it is.")
    }

    /// The page of these items; each comes with where it stands.
    pub(super) fn of<T>(&self, items: Vec<(Position, T)>) -> Result<List<T>, ApiError> {
        self.of_those_until(items, None)
    }

    /// The same where not all is known: nothing of what stands behind `until` is to be told before all up to it was, and the next page begins there.
    pub(super) fn of_those_until<T>(&self, mut items: Vec<(Position, T)>, until: Option<Position>) -> Result<List<T>, ApiError> {
        let limit = self.limit()?;
        if let Some(after) = self.after()? {
            items.retain(|(position, _)| *position > after);
        }
        if let Some(until) = &until {
            items.retain(|(position, _)| position <= until);
        }
        items.sort_by(|(one, _), (other, _)| one.cmp(other));
        let more = items.len() > limit;
        items.truncate(limit);
        let last = if more { items.last().map(|(position, _)| position.clone()) } else { until };
        let next = last.map(|(time, id)| format!("{time}.{id}"));
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
    fn a_list_that_is_found_part_by_part_lacks_nothing_and_has_nothing_twice() {
        let known: Vec<(Position, i128)> = [1, 4, 6].map(|n| ((n, String::new()), n)).into();
        let sought: Vec<i128> = vec![0, 2, 3, 5, 7];
        let (mut found, mut cursor) = (Vec::new(), None);
        loop {
            let query = PageQuery { limit: Some("2".to_owned()), cursor: cursor.clone() };
            let after = query.after().unwrap().map(|(n, _)| n);
            // One at a time, of which some turn out not to be there.
            let next = sought.iter().copied().find(|n| Some(*n) > after);
            let there = next.filter(|n| *n != 3).map(|n| ((n, String::new()), n));
            let until = next.filter(|n| *n < 7).map(|n| (n, String::new()));
            let page = query.of_those_until(known.iter().cloned().chain(there).collect(), until).unwrap();
            assert!(page.items.len() <= 2);
            found.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, [0, 1, 2, 4, 5, 6, 7]);
    }

    #[test]
    fn a_bad_page_is_refused() {
        for (limit, cursor) in [(Some("0"), None), (Some("1001"), None), (Some("x"), None), (None, Some("x")), (None, Some("x.y"))] {
            let query = PageQuery { limit: limit.map(str::to_owned), cursor: cursor.map(str::to_owned) };
            assert!(query.of::<()>(Vec::new()).is_err(), "{query:?}");
        }
    }
}
