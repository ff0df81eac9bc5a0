// Package publish writes the node's ResourceSlices.
//
// A [Publisher] publishes while its plugin instance is the leader of the node (package leader). It
// works in three steps, and each has its own pace:
//
//   - It builds the slices when the inventory, a policy, a claim that delays a change, the API
//     server's version or the fields that it keeps have changed. [Layouts] decides how each GPU is
//     offered: whole, in partitions or in shares. It keeps every allocated device published, with
//     the counters that it consumed when it was allocated, until its claim ends.
//   - It marks the built slices with taints, for health and readiness, whenever these change. This
//     waits for nothing, except for a new leader's first build.
//   - It passes the marked slices to Kubernetes' slice controller, one by one if only taints differ
//     (package rollout).
//
// After an error it keeps what is published. Slices stay when the plugin stops.
//
// The package changes no hardware, and prepares no claim.
package publish
