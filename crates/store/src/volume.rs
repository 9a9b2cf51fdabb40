//! The volume: where everything lies.
