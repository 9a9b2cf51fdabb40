//! Faults planted on purpose, to show that the simulator finds them. Without the feature `planted-faults` there are none to choose.

/// Which rules are broken.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    #[cfg(feature = "planted-faults")]
    planted: Option<Fault>,
}

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An owner releases whatever it finds, also another's.
    ReleaseWithoutEpoch,
    /// An owner counts its lease from when it hears of the renewal.
    RenewalFromReply,
    /// The record names a checkpoint that is still being written.
    PublishedBeforeDurable,
    /// A waiter never finds that an owner or another waiter is gone.
    ExpiryIgnored,
    /// A waiter believes the time in the record.
    TakeoverByWallClock,
}

#[cfg(feature = "planted-faults")]
impl Fault {
    pub const ALL: [Self; 5] =
        [Self::ReleaseWithoutEpoch, Self::RenewalFromReply, Self::PublishedBeforeDurable, Self::ExpiryIgnored, Self::TakeoverByWallClock];
}

#[cfg(feature = "planted-faults")]
impl From<Fault> for Faults {
    fn from(fault: Fault) -> Self {
        Self { planted: Some(fault) }
    }
}

macro_rules! switches {
    ($($name:ident: $fault:ident),* $(,)?) => {
        impl Faults {
            $(
                #[allow(clippy::unused_self, reason = "without the feature there is nothing to look at")]
                pub(crate) fn $name(self) -> bool {
                    #[cfg(feature = "planted-faults")]
                    return self.planted == Some(Fault::$fault);
                    #[cfg(not(feature = "planted-faults"))]
                    false
                }
            )*
        }
    };
}

switches! {
    releases_blindly: ReleaseWithoutEpoch,
    counts_from_reply: RenewalFromReply,
    publishes_early: PublishedBeforeDurable,
    ignores_expiry: ExpiryIgnored,
    believes_wall_clocks: TakeoverByWallClock,
}
