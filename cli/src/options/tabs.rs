//! Options of browser tabs.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::Args;
use kyklos::Error;

use super::{List, ListItem, headings};
use crate::devices;
use crate::failure::{Failure, Result};

/// How browser tabs come in.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = headings::TABS)]
pub(crate) struct TabArgs {
    /// Where the page is served, tab.html of demos/browser/ of the same release: https, or http on
    /// the machine of the browser [default: http://localhost:8000/tab.html]
    #[arg(long, value_name = "URL")]
    pub(crate) tab_page: Option<String>,
    /// UDP addresses of this machine that browsers connect to, the first one first; without a port,
    /// any free one [default: 127.0.0.1, for a browser on this machine]
    #[arg(long, value_name = "IP[:PORT],…")]
    pub(crate) tab_address: Option<List<TabAddress>>,
}

/// An address, with or without a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TabAddress(SocketAddr);

impl ListItem for TabAddress {
    fn item(text: &str) -> Result<Self, Error> {
        let address = text.parse().or_else(|_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, 0)));
        match address {
            Ok(address) if !address.ip().is_unspecified() => Ok(Self(address)),
            _ => Err(Error::request(
                format!("`{text}` is no address that a browser can connect to"),
                "give an IP address of this machine, with or without a port, such as 192.168.1.7:4000",
            )),
        }
    }
}

impl TabArgs {
    /// Refuses options that no rank needs.
    pub(crate) fn refuse_without_tabs(&self) -> Result<()> {
        let given = [("--tab-page", self.tab_page.is_some()), ("--tab-address", self.tab_address.is_some())];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                Err(Failure::request(format!("{option} without a tab"), "add --device tab, or leave it out"))
            }
            None => Ok(()),
        }
    }

    /// Lets tabs in from now on. A tab may take so long to come.
    pub(crate) fn let_in(&self, patience: Duration) -> Result<()> {
        let addresses: Vec<SocketAddr> = match &self.tab_address {
            Some(List(addresses)) => addresses.iter().map(|TabAddress(address)| *address).collect(),
            None => Vec::new(),
        };
        devices::let_in(self.tab_page.as_deref(), &addresses, patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_machines_and_may_have_a_port() {
        for (text, address) in [
            ("127.0.0.1", "127.0.0.1:0"),
            ("::1", "[::1]:0"),
            ("[::1]:7", "[::1]:7"),
            ("1.2.3.4:5", "1.2.3.4:5"),
        ] {
            assert_eq!(TabAddress::item(text).unwrap().0.to_string(), address);
        }
        for wrong in ["", "localhost", "0.0.0.0:4", "::", "1.2.3.4:", "1.2.3.4:99999"] {
            assert!(TabAddress::item(wrong).is_err(), "{wrong}");
        }
    }
}
