package events

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Reason is the reason of an Event, with all that the documentation says about Events with this
// reason. Only this package can make one, so that every Event is in the [Catalogue].
type Reason struct{ name, severity, objects, meaning, action string }

// String returns the reason as an Event has it.
func (r Reason) String() string { return r.name }

// Severity returns the Event's type: Normal or Warning.
func (r Reason) Severity() string { return r.severity }

// Objects says what the Event can be about.
func (r Reason) Objects() string { return r.objects }

// Meaning says what happened, in Markdown.
func (r Reason) Meaning() string { return r.meaning }

// Action says what an admin or a user should do, in Markdown.
func (r Reason) Action() string { return r.action }

// What Events are about.
const (
	onNode        = "Node"
	onClaim       = "claim"
	onPods        = "Pods" // that have the device
	onNodeAndPods = "Node, Pods"
)

var catalogue []Reason

// Catalogue returns the reasons of all Events, sorted.
func Catalogue() []Reason {
	all := slices.Clone(catalogue)
	slices.SortFunc(all, func(a, b Reason) int { return strings.Compare(a.name, b.name) })
	return all
}

func warning(name, objects, meaning, action string) Reason {
	r := Reason{name, corev1.EventTypeWarning, objects, meaning, action}
	catalogue = append(catalogue, r)
	return r
}

func normal(name, objects, meaning, action string) Reason {
	r := Reason{name, corev1.EventTypeNormal, objects, meaning, action}
	catalogue = append(catalogue, r)
	return r
}

const nothing = "Nothing"

// The health of devices.
var (
	GPULost = warning("GPULost", onNodeAndPods, "a device no longer answers",
		"As the Event says: usually reboot the node, or replace the card. See [recovery](health.md#recovery)")
	GPUUnhealthy = warning("GPUUnhealthy", onNodeAndPods, "a device must not be used until it was reset",
		"As the Event says: end the Pods on the GPU and reset it. See [recovery](health.md#recovery)")
	GPUUnknown = warning("GPUUnknown", onNodeAndPods, "the health of a device is not known, for example because a query hangs",
		"As the Event says. If it lasts, look at the plugin's log")
	GPUDegraded = warning("GPUDegraded", onNodeAndPods, "a device works with a defect",
		"As the Event says: plan a reset or a replacement")
	GPUChanged   = normal("GPUChanged", onNodeAndPods, "one finding about a device ended, another remains", "As the Event says")
	GPURecovered = normal("GPURecovered", onNodeAndPods, "a device is healthy: no finding remains", nothing)
	GPUReport    = warning("GPUReport", onPods, "a report that takes no device out, such as a page fault of the application",
		"Look for the fault in the application")
	HealthNotCleared = warning("HealthNotCleared", onNode, "the annotation `gpu.nvidia.com/clear-health` names an unknown GPU",
		"Correct [the annotation](health.md#clearing-findings)")
)

// Claims.
var (
	DeviceLost = warning("DeviceLost", onClaim, "a device of the claim is gone and cannot be created again",
		"Delete the claim's Pods")
	UnprepareFailed = warning("UnprepareFailed", onClaim, "the devices could not be unprepared. The kubelet retries",
		"If it lasts: remove what the Event names")
	WholeGPUHeld = normal("WholeGPUHeld", onClaim, "the claim holds a whole GPU and asks for at most half of its memory. "+
		"Sent once, when the claim is prepared", "Consider [shares](sharing.md#manifests-for-consumableshares)")
	ClaimGone = warning("ClaimGone", onNode, "a claim was deleted while "+
		"[containers still use its devices](operations.md#repairs-and-garbage-collection)",
		"End these containers. The plugin then releases the devices")
	Repaired = normal("Repaired", onNode, "the plugin restored something that was missing or altered on the node",
		"If it comes often: find the program that changes it")
)

// What the node offers.
var (
	DevicesAvailable   = normal("DevicesAvailable", onNode, "the node prepares claims", nothing)
	DevicesUnavailable = warning("DevicesUnavailable", onNode, "the node [prepares no claims](operations.md#a-node-that-is-not-ready)",
		"As the Event says")
	DevicePlugin = warning("DevicePlugin", onNode, "NVIDIA's device plugin offers GPUs of the same node",
		"[Keep one of the two](operations.md#conflict-with-nvidias-device-plugin) off this node")
	GPUsWithheld = warning("GPUsWithheld", onNode, "GPUs are not offered, because claims of NVIDIA's DRA driver have them",
		"Wait until these claims end, or delete their Pods. See [migration](migration.md)")
	PredecessorDaemon = warning("PredecessorDaemon", onNode, "an MPS daemon of NVIDIA's DRA driver has outlived its claim",
		"Delete the Deployment with the command in the Event")
	GPUsLimited = normal("GPUsLimited", onNode, "GPUs are not offered as their [MIG policy](mig.md#administration) or "+
		"`passthrough` promises",
		"As the Event says for each GPU")
	ValidationNotEnforced = warning("ValidationNotEnforced", onNode, "the chart's value `requireValidation` is on, but the cluster has "+
		"no device taints. GPUs are offered before their [check](health.md#checking-gpus-before-use)",
		"Enable the feature gate `DRADeviceTaints`, or switch the value off")
	ConfigurationInForce = normal("ConfigurationInForce", onNode,
		"another [configuration](operations.md#configurations) is in force, or it has changed. The Event says why", nothing)
	ConfigurationIgnored = warning("ConfigurationIgnored", onNode,
		"a label or the settings file is invalid. The [configuration](operations.md#configurations) before stays in force",
		"Correct the label, or the value that the Event names")
	PolicyIgnored = warning("PolicyIgnored", onNode, "the rules in the annotations `gpu.nvidia.com/mig-policy` and "+
		"`gpu.nvidia.com/passthrough` cannot be parsed or watched. The previous rules stay in force", "Correct the annotation")
	SharesNotOffered = warning("SharesNotOffered", onNode, "the cluster lacks a feature that shares need",
		"Enable the feature, or remove the rules in `shares`")
	FractionsNotOffered = warning("FractionsNotOffered", onNode, "GPUs cannot be offered in fractions",
		"Exclude them from the rules in `shares`, or offer plain shares")
	SharesEnding = warning("SharesEnding", onNode, "claims hold shares that are no longer configured",
		"Wait until these claims end, or delete their Pods")
	MPSNotRunning = warning("MPSNotRunning", onNode, "the node offers fractions, but has no MPS supervisor",
		"Look at the DaemonSet `…-mps`")
	SlowScheduler = warning("SlowScheduler", onNode, "the node publishes counters to a Kubernetes before 1.37, whose "+
		"[scheduler is slow](performance.md#the-scheduler) with them", "Upgrade Kubernetes, or use `mig.policy=static` where possible")
	SlicesRejected = warning("SlicesRejected", onNode, "the API server rejects the node's slices as invalid",
		"Look for an admission policy that refuses them. If there is none, report a bug")
)

// Driver upgrades and uninstallation.
var (
	DriverReleased = normal("DriverReleased", onNode, "the plugin has released all GPUs [for a driver upgrade](health.md#changing-the-driver)",
		"Replace the driver, then remove the request")
	DriverHeld = warning("DriverHeld", onNode, "the GPUs could not be released for a driver upgrade. The plugin tries again",
		"End what the Event names")
	DriverTaken  = normal("DriverTaken", onNode, "the request to release the GPUs was removed", nothing)
	MIGModeStays = warning("MIGModeStays", onNode, "the uninstallation could not switch off "+
		"[a MIG mode of the driver](mig.md#mig-mode-ownership)", "Switch it off with the command in the Event")
)
