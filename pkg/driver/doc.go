// Package driver is the plugin's life: it wires the rooms below it together, registers with the kubelet, answers its calls, and publishes what the
// node offers.
//
// Several instances of it may run on one node for a while, during a rolling update. All of them answer the kubelet; what they share is on disk behind
// flocks, so they cannot disagree. Only the holder of the publisher flock writes ResourceSlices, and it yields to a newer instance.
//
// It registers and serves as soon as it can read its records and has looked at the hardware once, whatever that found; hardware that does not answer
// holds it up for a few seconds only. Without a GPU driver a Prepare says "not ready yet" and why, and an Unprepare does its work all the same. It
// decides nothing about hardware (package nvidia), the transaction (package prepare) or names and attributes (package device).
package driver
