package health

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Weight is what an XID does to a verdict.
type Weight string

const (
	// Ignored is counted and no more.
	Ignored Weight = "ignore"
	// Told is said to who looks, and never takes a device out: errors of applications, and information.
	Told Weight = "app"
	// Degrading makes a device Degraded until it has not come again for a while.
	Degrading Weight = "degraded"
	// Breaking makes a device Unhealthy until a reset is seen.
	Breaking Weight = "unhealthy"
)

// Meaning is what an XID says, and what to do about it.
type Meaning struct {
	Text   string
	Action string
	Weight Weight
}

// What an operator does, by the kinds of remedies that NVIDIA's catalogue of XIDs knows.
const (
	doNothing   = "nothing to do"
	restartApp  = "restart the application that failed; if it happens with others on this GPU too, look at the GPU"
	investigate = "look at the driver's messages (dmesg, NVRM) and at nvidia-smi -q for this GPU; reset it if it does not work"
	reset       = "drain the node's Pods from this GPU, let the plugin let go of it (the Node's annotation gpu.nvidia.com/release-driver=true), and reset it (nvidia-smi --gpu-reset); reboot the node if that fails, replace the card if it comes back"
	reboot      = "drain and reboot the node"
	powerCycle  = "drain the node and switch its power off and on; if the GPU is not there afterwards, check its seat and cables or replace it"
	mechanics   = "check the card's seat and its power cables"
	vendor      = "contact the vendor's support; the card may have to be replaced"
	updateApp   = "look at the application's use of peer-to-peer memory"
)

// xids are what is known of the codes. Meanings and remedies: NVIDIA's catalogue of XIDs (https://docs.nvidia.com/deploy/xid-errors) as public tools apply
// it (github.com/aws/eks-node-monitoring-agent), and of codes that are not in there what nverror.h of github.com/NVIDIA/open-gpu-kernel-modules 595.45.04 calls
// them. Those only known by their name never do more than degrade.
var xids = withEngines(map[uint64]Meaning{
	8:   {"a channel of an application stopped responding", restartApp, Told},
	11:  {"an application gave the GPU commands that it cannot read", restartApp, Told},
	13:  {"an application's kernel or shader made the graphics engine fail", restartApp, Told},
	25:  {"an application's commands are illegal", restartApp, Told},
	31:  {"an application touched memory that is not its own (MMU fault)", restartApp, Told},
	32:  {"an application's commands were corrupted on the way", restartApp, Told},
	43:  {"an application failed and was stopped; the GPU is fine", doNothing, Told},
	44:  {"a fault while switching between applications", restartApp, Told},
	45:  {"an application's work was removed after an earlier error", doNothing, Told},
	46:  {"the GPU stopped processing", reset, Breaking},
	48:  {"uncorrectable memory error (double bit ECC)", reset, Breaking},
	54:  {"the card's auxiliary power is not connected", mechanics, Breaking},
	58:  {"frame buffer memory error", reset, Degrading},
	61:  {"the power controller stopped at a breakpoint", reset, Degrading},
	62:  {"an internal controller halted", reset, Breaking},
	63:  {"bad memory was recorded, to be remapped or retired at the next reset", doNothing, Told},
	64:  {"recording bad memory for remapping or retirement failed", reset, Breaking},
	69:  {"an application used the graphics class wrongly", restartApp, Told},
	74:  {"NVLink error", reset, Breaking},
	79:  {"the GPU has fallen off the PCIe bus", powerCycle, Breaking},
	92:  {"many corrected memory errors", doNothing, Told},
	93:  {"the InfoROM was erased too often", vendor, Degrading},
	94:  {"a memory error that was contained to one application", restartApp, Told},
	95:  {"a memory error that was not contained: all applications on the GPU are affected", reset, Breaking},
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
	137: {"an application touched a peer's memory that is not its own", updateApp, Told},
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
	151: {"a key of confidential computing could not be rotated", reboot, Breaking},
	// The recommendation itself is read from the driver, and is a finding of its own.
	154: {"the driver changed its recommended recovery action", doNothing, Told},
	155: {"NVLink error reported by software", reset, Breaking},
	156: {"a resource of the GPU was retired", reset, Breaking},
	157: {"a resource of the GPU could not be retired: no spare is left", vendor, Told},
	158: {"fatal timeout in the GPU", reset, Breaking},
	160: {"a memory channel was retired", investigate, Degrading},
	161: {"retiring a memory channel failed", vendor, Degrading},
	167: {"fatal PCIe timeout", reboot, Degrading},
	168: {"the GPU runs with less memory than it was built with", investigate, Degrading},
	169: {"the security processor halted", reset, Degrading},
	// Both come beside a 48, which decides.
	171: {"an uncorrectable error was in DRAM", doNothing, Told},
	172: {"an uncorrectable error was in SRAM", "if it comes back, look whether nvidia-smi -q says that the SRAM threshold is exceeded", Told},
	173: {"the link between processor and GPU (C2C) is down", reboot, Degrading},
	175: {"error of the memory subsystem", reset, Degrading},
	176: {"many corrected PCIe errors", investigate, Degrading},
})

// withEngines adds the codes that say of an engine that an application made it fail.
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
			table[code] = Meaning{"an application made a " + r.engine + " fail", restartApp, Told}
		}
	}
	return table
}

// verdict is the state that the meaning makes of a part, and what ends it. What takes a reset or more is never over by itself.
func (m Meaning) verdict() (State, Ends) {
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

// Rules say what XIDs mean: the table, and before it what an admin says.
type Rules map[uint64]Weight

// ParseRules reads CODE=WEIGHT,…; the weights are ignore, app, degraded and unhealthy. Of one code the last rule holds.
func ParseRules(s string) (Rules, error) {
	rules := Rules{}
	for rule := range strings.SplitSeq(s, ",") {
		rule = strings.TrimSpace(rule)
		if rule == "" {
			continue
		}
		code, weight, found := strings.Cut(rule, "=")
		n, err := strconv.ParseUint(strings.TrimSpace(code), 10, 32)
		if !found || err != nil {
			return nil, fmt.Errorf("rule %q: want CODE=WEIGHT with the number of an XID, as in 109=app", rule)
		}
		w := Weight(strings.TrimSpace(weight))
		if !slices.Contains([]Weight{Ignored, Told, Degrading, Breaking}, w) {
			return nil, fmt.Errorf("rule %q: %q is none of ignore, app, degraded, unhealthy", rule, w)
		}
		rules[n] = w
	}
	return rules, nil
}

// XID is what a code means. One that no table knows degrades: newer drivers, which have newer codes, also recommend a recovery action where it takes one.
func (r Rules) XID(code uint64) Meaning {
	m, known := xids[code]
	if !known {
		m = Meaning{"unknown to this version of the driver", investigate, Degrading}
	}
	if w, is := r[code]; is {
		m.Weight = w
	}
	return m
}

// event is what NVML's events other than XIDs mean. recommends says that the driver has a recovery action, which then decides about memory errors.
func event(kind device.EventKind, recommends bool) Meaning {
	switch kind {
	case device.EventDoubleBitECC:
		if recommends {
			return Meaning{"uncorrectable memory error; the driver's recovery action says whether the GPU needs a reset", investigate, Degrading}
		}
		return Meaning{"uncorrectable memory error", reset, Breaking}
	case device.EventSingleBitStorm:
		return Meaning{"many corrected memory errors", doNothing, Told}
	case device.EventRetirement:
		return Meaning{"bad memory was recorded, to be remapped or retired at the next reset", doNothing, Told}
	case device.EventRetirementFailed:
		return Meaning{"bad memory could not be retired", vendor, Degrading}
	case device.EventPoison:
		return Meaning{"an application used poisoned memory", restartApp, Told}
	case device.EventFatalPoison:
		return Meaning{"poisoned memory was used, and that could not be contained", reset, Breaking}
	case device.EventUnavailable:
		return Meaning{"the GPU is not available any more", reset, Breaking}
	default:
		return Meaning{"unknown to this version of the driver", investigate, Degrading}
	}
}

// isReset says whether what the driver recommends resets the GPU. Once it has been done, the driver recommends nothing.
func isReset(a device.RecoveryAction) bool {
	switch a {
	case device.RecoveryReset, device.RecoveryDrainAndReset, device.RecoveryBusReset, device.RecoveryReboot, device.RecoverySystemReboot:
		return true
	}
	return false
}

// recovery is what the driver's recommendation means. It is nil where nothing is recommended.
func recovery(a device.RecoveryAction) *Meaning {
	switch a {
	case device.RecoveryUnknown, device.RecoveryNone:
		return nil
	case device.RecoveryReset:
		return &Meaning{"the driver asks for a reset of the GPU", reset, Breaking}
	case device.RecoveryDrainAndReset:
		return &Meaning{"the driver asks to let what runs on the GPU end, and to reset it then", reset, Breaking}
	case device.RecoveryDrainP2P:
		return &Meaning{"the driver asks to end what uses the GPU from other GPUs", "end the applications that use this GPU together with others (peer to peer)", Breaking}
	case device.RecoveryBusReset:
		return &Meaning{"the driver asks for a reset of the GPU's PCIe bus", reboot, Breaking}
	case device.RecoveryReboot, device.RecoverySystemReboot:
		return &Meaning{"the driver asks for a reboot of the node", reboot, Breaking}
	case device.RecoveryIMEXDomain:
		return &Meaning{"the driver asks for a repair of the IMEX domain", "look at nvidia-imex on the nodes of this domain", Degrading}
	default:
		return &Meaning{"the driver asks for a recovery that this version does not know", investigate, Breaking}
	}
}
