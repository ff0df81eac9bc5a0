package health

import (
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Finding is one fault of a card, or one report about it, that has not ended.
type Finding struct {
	// Code names the kind of the finding in one word, for labels and taint values: "xid-79", "lost",
	// "remap-pending".
	Code string `json:"code"`
	// XID is NVIDIA's XID error code. It is 0 for a finding that is not an XID.
	XID   uint64 `json:"xid,omitempty"`
	Part  Part   `json:"part"`
	State State  `json:"state"`
	Ends  Ends   `json:"ends"`
	// Reason says what is wrong. Action says what an operator can do about it.
	Reason string `json:"reason"`
	Action string `json:"action"`
	// First and Last are the times when this finding was seen first and last. Since is when the part
	// of the card entered its present state. It is earlier than First if another finding had caused
	// that state before. A restart of the plugin does not change Since.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	Since time.Time `json:"since"`
	Count uint64    `json:"count"`
}

func (f Finding) key() string { return f.Code + f.Part.suffix() }

// Message returns one line for people, with the reason and the action.
func (f Finding) Message() string { return f.Reason + ": " + f.Action }

// Verdict is the health of one device, with the findings that explain it.
type Verdict struct {
	State State
	// Causes lists the findings that affect the device, the gravest first, and of the same state the
	// oldest first.
	Causes []Finding
}

// Unreachable returns why no container can use the device: its GPU is lost or hangs. It returns ""
// if neither is the case. A device whose state is unknown for another reason may work.
func (v Verdict) Unreachable() string {
	for _, f := range v.Causes {
		if f.State == Lost || f.Code == hungCode {
			return f.Message()
		}
	}
	return ""
}

// Message returns the message of the gravest cause, or "" for a healthy device.
func (v Verdict) Message() string {
	if len(v.Causes) == 0 {
		return ""
	}
	return v.Causes[0].Message()
}

// Change tells a reader of [Monitor.Changes] that a finding started, entered another state or
// ended.
type Change struct {
	Card    device.Card
	Finding Finding
	// Over is true if the finding ended. Then Why explains what ended the finding.
	Over bool
	Why  string
}

// Device returns the name of the device that the change is about: the whole GPU or one of its MIG
// devices.
func (c Change) Device() string { return c.Card.PCIAddress.WholeName() + c.Finding.Part.suffix() }
