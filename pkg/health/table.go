package health

import (
	"maps"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Weight says how grave an event, such as an XID, is for the devices that it affects.
type Weight string

const (
	// Ignored events are counted for the metrics, but are no findings.
	Ignored Weight = "ignore"
	// Reported events become findings but never affect the state of a device. Examples are application
	// errors.
	Reported Weight = "app"
	// Degrading events make a device Degraded until they have not recurred for a while. If their
	// remedy is a reset or more, the device stays Degraded until a reset.
	Degrading Weight = "degraded"
	// Breaking events make a device Unhealthy until a reset.
	Breaking Weight = "unhealthy"
)

// Meaning is what an event means, what an operator should do about it, and its weight.
type Meaning struct {
	Text   string
	Action string
	Weight Weight
}

// These are the remedies for operators. They follow the kinds of actions in NVIDIA's XID catalogue.
const (
	doNothing   = "nothing to do"
	restartApp  = "restart the failed application; if others fail on this GPU too, check the GPU"
	investigate = "check the driver's messages (dmesg, NVRM) and nvidia-smi -q for this GPU; reset it if it does not work"
	reset       = "drain the node's Pods from this GPU, release it (annotate the Node with gpu.nvidia.com/release-driver=true)" +
		" and reset it (nvidia-smi --gpu-reset); if that fails, reboot the node; if the fault recurs, replace the card"
	reboot     = "drain and reboot the node"
	powerCycle = "drain the node and power-cycle it; if the GPU does not come back, check its slot and cables or replace it"
	mechanics  = "check that the card is fully inserted and its power cables are connected"
	vendor     = "contact the vendor's support; the card may have to be replaced"
	updateApp  = "check the application's use of peer-to-peer memory"
)

// xidMeanings lists the known XIDs. Most are from NVIDIA's XID catalogue
// (https://docs.nvidia.com/deploy/xid-errors), with the weights of
// github.com/aws/eks-node-monitoring-agent.
//
// XIDs that are not in the catalogue are from nverror.h of
// github.com/NVIDIA/open-gpu-kernel-modules 595.45.04. They never do more than degrade.
var xidMeanings = withEngines(map[uint64]Meaning{
	8:   {"a channel of an application stopped responding", restartApp, Reported},
	11:  {"an application sent the GPU commands that it cannot read", restartApp, Reported},
	13:  {"an application's kernel or shader made the graphics engine fail", restartApp, Reported},
	25:  {"an application sent illegal commands", restartApp, Reported},
	31:  {"an application accessed memory that is not its own (MMU fault)", restartApp, Reported},
	32:  {"an application's commands were corrupted on the way to the GPU", restartApp, Reported},
	43:  {"an application failed and was stopped; the GPU is fine", doNothing, Reported},
	44:  {"a fault while switching between applications", restartApp, Reported},
	45:  {"an application's work was removed after an earlier error", doNothing, Reported},
	46:  {"the GPU stopped processing", reset, Breaking},
	48:  {"uncorrectable memory error (double bit ECC)", reset, Breaking},
	54:  {"the card's auxiliary power is not connected", mechanics, Breaking},
	58:  {"frame buffer memory error", reset, Degrading},
	61:  {"the power controller stopped at a breakpoint", reset, Degrading},
	62:  {"an internal controller halted", reset, Breaking},
	63:  {"bad memory was recorded; it is remapped or retired at the next reset", doNothing, Reported},
	64:  {"recording bad memory for remapping or retirement failed", reset, Breaking},
	69:  {"an application misused the graphics class", restartApp, Reported},
	74:  {"NVLink error", reset, Breaking},
	79:  {"the GPU has fallen off the PCIe bus", powerCycle, Breaking},
	92:  {"many corrected memory errors", doNothing, Reported},
	93:  {"the InfoROM was erased too often", vendor, Degrading},
	94:  {"a memory error was contained to one application", restartApp, Reported},
	95:  {"a memory error was not contained: all applications on the GPU are affected", reset, Breaking},
	109: {"switching between applications took too long", reset, Breaking},
	110: {"security fault", reset, Breaking},
	119: {"the GPU's system processor (GSP) did not answer in time", reset, Breaking},
	120: {"error of the GPU's system processor (GSP)", reset, Breaking},
	121: {"error on the link between processor and GPU (C2C)", investigate, Degrading},
	122: {"reading the card's SPI memory failed", vendor, Degrading},
	123: {"writing the card's SPI memory failed", vendor, Degrading},
	124: {"erasing the card's SPI memory failed", vendor, Degrading},
	125: {"the InfoROM's file system is damaged", vendor, Degrading},
	136: {"NVLink training failed", reset, Breaking},
	137: {"an application accessed a peer's memory that is not its own", updateApp, Reported},
	140: {"unrecovered ECC error", reset, Breaking},
	142: {"error of a video encoder", vendor, Breaking},
	143: {"the GPU could not be initialized", reset, Breaking},
	144: {"NVLink 5 error (SAW)", investigate, Degrading},
	145: {"NVLink 5 error (RLW)", investigate, Degrading},
	146: {"NVLink 5 error (TLW)", investigate, Degrading},
	147: {"NVLink 5 error (TREX)", investigate, Degrading},
	148: {"NVLink 5 error (NVLPW)", investigate, Degrading},
	149: {"NVLink 5 error (NETIR)", investigate, Degrading},
	150: {"NVLink 5 error (MSE)", investigate, Degrading},
	151: {"a confidential-computing key could not be rotated", reboot, Breaking},
	// XID 154 itself is no fault: the plugin reads the recommended action from the driver, and adds a
	// separate finding for it.
	154: {"the driver changed its recommended recovery action", doNothing, Reported},
	155: {"NVLink error reported by software", reset, Breaking},
	156: {"a resource of the GPU was retired", reset, Breaking},
	157: {"a GPU resource could not be retired: no spare is left", vendor, Reported},
	158: {"fatal timeout in the GPU", reset, Breaking},
	160: {"a memory channel was retired", investigate, Degrading},
	161: {"retiring a memory channel failed", vendor, Degrading},
	167: {"fatal PCIe timeout", reboot, Degrading},
	168: {"the GPU runs with less memory than it was built with", investigate, Degrading},
	169: {"the security processor halted", reset, Degrading},
	// The driver sends XID 48 together with XID 171 or 172. The finding about XID 48 decides whether a
	// reset is needed, so this one is only reported.
	171: {"an uncorrectable error was in DRAM", doNothing, Reported},
	172: {"an uncorrectable error was in SRAM",
		"if it recurs, check whether nvidia-smi -q reports that the SRAM threshold is exceeded", Reported},
	173: {"the link between processor and GPU (C2C) is down", reboot, Degrading},
	175: {"error of the memory subsystem", reset, Degrading},
	176: {"many corrected PCIe errors", investigate, Degrading},
	999: {"an error whose number NVML does not know", investigate, Degrading}, // nvml.h, nvmlEventData_t
})

// withEngines returns the table with the XIDs added by which an engine, such as a video decoder,
// reports that an application made it fail.
func withEngines(table map[uint64]Meaning) map[uint64]Meaning {
	for _, r := range []struct {
		first, last uint64
		engine      string
	}{
		{39, 41, "copy engine"}, {70, 72, "copy engine"}, {75, 77, "copy engine"}, {85, 85, "copy engine"}, {126, 135, "copy engine"},
		{68, 68, "video decoder"}, {83, 84, "video decoder"}, {88, 89, "video decoder"}, {96, 98, "video decoder"},
		{47, 47, "video encoder"}, {65, 65, "video encoder"}, {73, 73, "video encoder"},
		{82, 82, "JPEG engine"}, {99, 105, "JPEG engine"}, {86, 86, "optical flow engine"}, {139, 139, "optical flow engine"},
	} {
		for code := r.first; code <= r.last; code++ {
			table[code] = Meaning{"an application made a " + r.engine + " fail", restartApp, Reported}
		}
	}
	return table
}

// stateAndEnd returns the state of a device after an event with the meaning m, and what ends the
// finding about that event. A finding that needs a reset or more never ends by time alone.
func (m Meaning) stateAndEnd() (State, Ends) {
	switch {
	case m.Weight == Breaking:
		return Unhealthy, EndsByReset
	case m.Weight == Degrading && slices.Contains([]string{reset, reboot, powerCycle, mechanics, vendor}, m.Action):
		return Degraded, EndsByReset
	case m.Weight == Degrading:
		return Degraded, EndsByTime
	default:
		return Healthy, EndsByTime
	}
}

// Rules map XIDs to weights that an admin has set.
type Rules map[uint64]Weight

// NewRules returns the weights that set has by the number of an XID, or the invalid fields below
// at.
func NewRules(set map[string]Weight, at *field.Path) (Rules, field.ErrorList) {
	rules := Rules{}
	var errs field.ErrorList
	for _, code := range slices.Sorted(maps.Keys(set)) {
		n, err := strconv.ParseUint(code, 10, 32)
		if err != nil || code != strconv.FormatUint(n, 10) {
			errs = append(errs, field.Invalid(at.Key(code), code, "want the number of an XID, such as 109"))
		}
		if !slices.Contains([]Weight{Ignored, Reported, Degrading, Breaking}, set[code]) {
			errs = append(errs, field.Invalid(at.Key(code), set[code], "want ignore, app, degraded or unhealthy"))
		}
		rules[n] = set[code]
	}
	return rules, errs
}

// XID returns the meaning of an XID, with the weight from the admin's rules if there is one.
func (r Rules) XID(code uint64) Meaning {
	m, known := xidMeanings[code]
	if !known {
		m = unknownMeaning
	}
	if w, is := r[code]; is {
		m.Weight = w
	}
	return m
}

// eventMeanings lists the NVML events that are no XIDs.
var eventMeanings = map[device.EventKind]Meaning{
	device.EventDoubleBitECC:     {"uncorrectable memory error", reset, Breaking},
	device.EventSingleBitStorm:   {"many corrected memory errors", doNothing, Reported},
	device.EventRetirement:       {"bad memory was recorded; it is remapped or retired at the next reset", doNothing, Reported},
	device.EventRetirementFailed: {"bad memory could not be retired", vendor, Degrading},
	device.EventPoison:           {"an application used poisoned memory", restartApp, Reported},
	device.EventFatalPoison:      {"poisoned memory was used, and the error was not contained", reset, Breaking},
	device.EventUnavailable:      {"the GPU is no longer available", reset, Breaking},
}

// unknownMeaning is the meaning of an event that the tables lack. It makes a device at most
// Degraded, because a driver that is new enough to send it also reports a recovery action if a
// reset is needed.
var unknownMeaning = Meaning{"unknown to this version of the driver", investigate, Degrading}

// eventMeaning returns the meaning of an NVML event that is no XID. If the driver reports recovery
// actions, recommends is true, and these decide whether a memory error needs a reset.
func eventMeaning(kind device.EventKind, recommends bool) Meaning {
	if kind == device.EventDoubleBitECC && recommends {
		return Meaning{"uncorrectable memory error; the driver's recovery action says whether the GPU needs a reset", investigate, Degrading}
	}
	if m, known := eventMeanings[kind]; known {
		return m
	}
	return unknownMeaning
}

// isReset reports whether the recovery action a includes a reset of the GPU. After that reset the
// driver recommends nothing.
func isReset(a device.RecoveryAction) bool {
	remedy := recoveryMeanings[a].Action
	return remedy == reset || remedy == reboot
}

// recoveryMeanings lists the driver's recovery actions.
var recoveryMeanings = map[device.RecoveryAction]Meaning{
	device.RecoveryReset:         {"the driver asks for a reset of the GPU", reset, Breaking},
	device.RecoveryDrainAndReset: {"the driver asks to drain the GPU and then reset it", reset, Breaking},
	device.RecoveryDrainP2P: {"the driver asks to end peer-to-peer use of the GPU",
		"end the applications that use this GPU together with others (peer to peer)", Breaking},
	device.RecoveryBusReset:     {"the driver asks for a reset of the GPU's PCIe bus", reboot, Breaking},
	device.RecoveryReboot:       {"the driver asks for a reboot of the node", reboot, Breaking},
	device.RecoverySystemReboot: {"the driver asks for a reboot of the node", reboot, Breaking},
	device.RecoveryIMEXDomain:   {"the driver asks to repair the IMEX domain", "check nvidia-imex on the nodes of this domain", Degrading},
}

// recoveryMeaning returns the meaning of the driver's recovery action. asks is false if the driver
// recommends nothing.
func recoveryMeaning(a device.RecoveryAction) (_ Meaning, asks bool) {
	if a == device.RecoveryUnknown || a == device.RecoveryNone {
		return Meaning{}, false
	}
	if m, known := recoveryMeanings[a]; known {
		return m, true
	}
	return Meaning{"the driver asks for a recovery action that this version does not know", investigate, Breaking}, true
}
