//! How ranks become a group, for the first time and again after a failure.

pub(crate) mod addresses;
pub(crate) mod admission;
pub(crate) mod bootstrap;
pub(crate) mod config;
pub(crate) mod description;
pub(crate) mod endpoint;
pub(crate) mod first_group;
pub(crate) mod hello;
pub(crate) mod link_terms;
pub(crate) mod mesh;
pub(crate) mod other_carrier;
pub(crate) mod peer_connection;
pub(crate) mod presence;
pub(crate) mod prior_group;
pub(crate) mod refusals;
pub(crate) mod regroup;
pub(crate) mod side_by_side;
