//! A device in reports.

use kyklos::backend::DeviceInfo;
use kyklos_transport::harmless;
use serde::{Deserialize, Serialize};

/// What reports say of a device; every text is empty where nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceReport {
    pub(crate) backend: String,
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) class: String,
    pub(crate) kernel: String,
}

impl DeviceReport {
    pub(crate) fn new(info: &DeviceInfo) -> Self {
        let short = |text: &str| text.chars().take(200).collect();
        Self {
            backend: info.backend.to_owned(),
            name: short(&info.name),
            driver: short(&info.driver),
            class: serde_json::to_value(info.class)
                .ok()
                .and_then(|class| class.as_str().map(str::to_owned))
                .unwrap_or_default(),
            kernel: short(&info.kernel),
        }
    }

    /// The same with texts that another rank cannot control a terminal with.
    pub(crate) fn harmless(&self) -> Self {
        let Self { backend, name, driver, class, kernel } = self;
        let [backend, name, driver, class, kernel] =
            [backend, name, driver, class, kernel].map(|text| harmless(text));
        Self { backend, name, driver, class, kernel }
    }

    /// Backend and name.
    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.backend, self.name)
    }
}
