package health

import (
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Finding is one thing that was seen on a card and is not over.
type Finding struct {
	// Code is one word for labels and values: "xid-79", "lost", "remap-pending".
	Code string `json:"code"`
	// XID is the number that a finding about an XID was made of, else 0.
	XID   uint64 `json:"xid,omitempty"`
	Part  Part   `json:"part"`
	State State  `json:"state"`
	Ends  Ends   `json:"ends"`
	// Reason says what it is, Action what an operator can do.
	Reason string `json:"reason"`
	Action string `json:"action"`
	// First and Last are when it was seen first and last, Since is since when its part of the card has been in this state without a break: before First
	// where another finding of the same state was there already.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	Since time.Time `json:"since"`
	Count uint64    `json:"count"`
}

func (f *Finding) key() string { return f.Code + f.Part.name() }

// Verdict is what the findings say of one device.
type Verdict struct {
	State State
	// Causes are what made it so, the gravest first. A milder one stays beside a graver one. Each
	// state has at most two: an XID and something else.
	Causes []Cause
}

// Cause is the longest-standing finding of a state, among XIDs or among all others.
type Cause struct {
	State State
	Code  string
	// XID is the number of an XID, else 0.
	XID            uint64
	Reason, Action string
	// Since is stable while the state lasts, also over a restart.
	Since time.Time
}

// Message is one line for people: what it is, and the way out.
func (c Cause) Message() string { return c.Reason + ": " + c.Action }

// Message is that of the gravest cause, empty for a healthy device.
func (v Verdict) Message() string {
	if len(v.Causes) == 0 {
		return ""
	}
	return v.Causes[0].Message()
}

// Change is a finding that came or went.
type Change struct {
	Card    device.Card
	Finding Finding
	// Over says that it went, Why what ended it.
	Over bool
	Why  string
}

// Device is the name of what the change is about: the card, or an instance on it.
func (c Change) Device() string { return c.Card.PCIAddress.WholeName() + c.Finding.Part.name() }
