//! Faults planted on purpose, to show that the simulator finds them. Without the feature `planted-faults` there are none to choose.

/// Which rules are broken.
#[derive(Debug, Clone, Copy, Default)]
pub struct CollectFaults {
    #[cfg(feature = "planted-faults")]
    planted: Option<CollectFault>,
}

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectFault {
    /// Writers say nothing before they rely on others.
    NoIntent,
    /// Collectors remove what their first scan finds unused, and wait for nobody.
    DeletedAtFirstScan,
    /// Writers don't look at what is condemned.
    CondemnedIgnored,
    /// Collectors believe the time that an intent bears.
    ExpiryByWallClock,
    /// Writers publish however long it took.
    EndlessSave,
    /// Collectors take away the lists of others.
    ForeignListsRemoved,
}

#[cfg(feature = "planted-faults")]
impl From<CollectFault> for CollectFaults {
    fn from(fault: CollectFault) -> Self {
        Self { planted: Some(fault) }
    }
}

macro_rules! switches {
    ($($name:ident: $fault:ident),* $(,)?) => {
        impl CollectFaults {
            $(
                #[allow(clippy::unused_self, reason = "without the feature there is nothing to look at")]
                pub(super) fn $name(self) -> bool {
                    #[cfg(feature = "planted-faults")]
                    return self.planted == Some(CollectFault::$fault);
                    #[cfg(not(feature = "planted-faults"))]
                    false
                }
            )*
        }
    };
}

switches! {
    says_nothing: NoIntent,
    waits_for_nobody: DeletedAtFirstScan,
    ignores_condemned: CondemnedIgnored,
    believes_wall_clocks: ExpiryByWallClock,
    never_gives_up: EndlessSave,
    removes_foreign_lists: ForeignListsRemoved,
}
