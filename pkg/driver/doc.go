// Package driver runs one instance of the plugin. It wires the other packages together, registers
// with the kubelet, answers the kubelet's calls and publishes the node's devices.
//
// During a rolling update several plugin instances run on one node. All of them answer the kubelet.
// Their shared state is on disk behind file locks, so they cannot disagree. Only the leader, the
// plugin instance with the leader lock, writes ResourceSlices. The leader hands over to a newer
// instance.
//
// A plugin instance registers after it has scanned the hardware once, whatever the scan's result.
// Hung hardware delays the registration by a few seconds only. Without a GPU driver a Prepare fails
// with the reason, and an Unprepare works.
//
// Other packages contain the access to the hardware (nvidia), the prepare transaction (prepare),
// and device names and attributes (device).
package driver
