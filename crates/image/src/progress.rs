//! How far a build is, for a progress bar or a log.

/// One step forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update<'a> {
    /// How much of the whole is done, from 0 to 1; never goes back.
    pub fraction: f32,
    /// What is being done now, a few words.
    pub message: &'a str,
}

/// Whoever wants to know. Called from other threads too.
pub trait Progress: Sync {
    fn update(&self, update: Update<'_>);
}

impl<F: Fn(Update<'_>) + Sync> Progress for F {
    fn update(&self, update: Update<'_>) {
        self(update);
    }
}

/// Tells nobody.
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _: Update<'_>) {}
}

/// A part of the whole, told as if it were all of it.
pub(crate) struct Part<'a> {
    pub(crate) whole: &'a dyn Progress,
    pub(crate) from: f32,
    pub(crate) to: f32,
}

impl Progress for Part<'_> {
    fn update(&self, update: Update<'_>) {
        let fraction = self.from + (self.to - self.from) * update.fraction.clamp(0.0, 1.0);
        self.whole.update(Update { fraction, ..update });
    }
}

impl dyn Progress + '_ {
    pub(crate) fn part(&self, from: f32, to: f32) -> Part<'_> {
        Part { whole: self, from, to }
    }

    pub(crate) fn tell(&self, fraction: f32, message: &str) {
        self.update(Update { fraction, message });
    }
}
