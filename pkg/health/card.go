package health

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// maxFindings is the maximum number of findings of one card. At this limit the monitor merges
	// further findings into one.
	maxFindings = 64
	// maxReports is the number of findings from which on the monitor drops those that do not affect
	// the card's health. Applications can cause these, so they leave room for others.
	maxReports = 32
	// maxLevels is the part of maxFindings that is reserved for findings that come from queries, such
	// as a pending row remap. There are fewer kinds of such findings than maxLevels.
	maxLevels = 16
	// manyCode is the code of the single finding that stands for all further findings once a card has
	// maxFindings. One place is reserved for it.
	manyCode = "many"
)

// card is the health state of one GPU and all its partitions.
type card struct {
	Card device.Card `json:"card"`
	// GPU is what the inventory last reported about the card. It stays while the card is lost, because
	// claims still have the card's devices and messages name them.
	GPU      *device.GPU `json:"gpu,omitempty"`
	Findings []*Finding  `json:"findings,omitempty"`
	// Recovery is the last recovery action that the driver reported. An answer without a recovery
	// action does not change Recovery.
	Recovery device.RecoveryAction `json:"recovery,omitempty"`
	// ResetRequested is true from the driver's first request for a reset until a reset was noticed.
	ResetRequested bool `json:"resetAsked,omitempty"`
	// Uncorrected is the number of uncorrected ECC errors, and Energy is the used energy. Both only
	// grow until the card is reset, but an admin may also clear the error counter.
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	Energy      *uint64 `json:"energyMillijoules,omitempty"`

	// Arrived is when the monitor first saw this card in this boot, or last noticed a reset of it.
	// Validated is the time in the Node's annotation that says that the card passed a check.
	Arrived   time.Time `json:"arrived,omitzero"`
	Validated time.Time `json:"validated,omitzero"`

	// OtherDriver is true while another kernel driver, such as vfio-pci, is bound to the card, so that
	// NVML cannot query it.
	OtherDriver bool `json:"away,omitempty"`

	// Lent is what GPU was before a claim had the card for a virtual machine. It stays until the card
	// is back as it was, or until an admin accepts the difference.
	Lent *device.GPU `json:"lent,omitempty"`

	// lastQuery is when the watcher process began its last conclusive query of the card. If the next
	// answer proves a reset, only findings from before lastQuery are surely older than that reset.
	lastQuery time.Time
	// lastHeard is when the card last answered, or when the watcher process started. failingSince is
	// when the card began to answer with errors only. fabricMissingSince is when the card was first
	// seen outside its NVLink fabric.
	lastHeard, failingSince, fabricMissingSince time.Time
	// recoveredAt is when the last finding with a state worse than Healthy ended.
	recoveredAt time.Time
	failure     string
}

// addFinding adds a new finding to the card. If the card already has a finding of this kind,
// addFinding updates that finding and increases its count.
func (m *Monitor) addFinding(c *card, f Finding, count int) {
	f, ok := c.fit(f)
	if !ok {
		return
	}
	if old := c.find(f.key()); old != nil {
		old.Count += uint64(max(count, 1))
		if f.Last.After(old.Last) {
			old.Last = f.Last
		}
		if old.Ends == EndsByReset && (f.Ends != EndsByReset || f.State < old.State) {
			return // a milder finding must not replace a finding that needs a reset
		}
		stateChanged, textChanged := old.State != f.State || old.Ends != f.Ends, old.Reason != f.Reason || old.Action != f.Action
		if old.State != f.State {
			old.Since = f.First
		}
		old.State, old.Ends, old.Reason, old.Action = f.State, f.Ends, f.Reason, f.Action
		switch {
		case stateChanged:
			m.recordChange(Change{Card: c.Card, Finding: *old})
		case textChanged:
			m.version++
		}
		return
	}
	f.Count = uint64(max(count, 1))
	if f.Last.IsZero() {
		f.Last = f.First
	}
	f.Since = f.First
	for _, other := range c.Findings {
		if other.State == f.State && other.Part.covers(f.Part) && other.Since.Before(f.Since) {
			f.Since = other.Since
		}
	}
	c.Findings = append(c.Findings, &f)
	m.recordChange(Change{Card: c.Card, Finding: f})
}

// fit returns the finding f as the card can have it. If the card has many findings, fit drops f if
// f does not affect the card's health, or else makes f the finding with manyCode, which stands for
// several and for the whole card. Findings from queries (EndsByLevel) always fit, as they are few.
func (c *card) fit(f Finding) (_ Finding, ok bool) {
	switch {
	case f.Ends == EndsByLevel || c.find(f.key()) != nil || len(c.Findings) < maxReports:
	case f.State == Healthy:
		return f, false
	case len(c.Findings) >= maxFindings-maxLevels-1:
		f.Code, f.XID, f.Part = manyCode, 0, Part{}
		f.Reason = "there are more kinds of errors than the plugin tracks"
	}
	return f, true
}

func (c *card) find(key string) *Finding {
	for _, f := range c.Findings {
		if f.key() == key {
			return f
		}
	}
	return nil
}

// endFindings ends the card's findings for which ends returns true. why explains the end.
func (m *Monitor) endFindings(c *card, ends func(*Finding) bool, why string) {
	var ended []*Finding
	kept := slices.DeleteFunc(slices.Clone(c.Findings), func(f *Finding) bool {
		if ends(f) {
			ended = append(ended, f)
			return true
		}
		return false
	})
	if len(ended) == 0 {
		return
	}
	c.Findings = kept
	for _, f := range ended {
		if f.State > Healthy {
			c.recoveredAt = m.now
		}
		m.recordChange(Change{Card: c.Card, Finding: *f, Over: true, Why: why})
	}
}

func (m *Monitor) endCode(c *card, code, why string) bool {
	is := func(f *Finding) bool { return f.Code == code }
	there := slices.ContainsFunc(c.Findings, is)
	m.endFindings(c, is, why)
	return there
}

// addLevel adds the finding f about a fault that the hardware reports in every answer while it
// lasts.
func (m *Monitor) addLevel(c *card, f Finding, when time.Time) {
	f.Ends, f.First, f.Last = EndsByLevel, when, when
	m.addFinding(c, f, 1)
}

// setLevel adds the finding f if present is true. Otherwise it ends the card's finding with f's
// code, and ended reports whether there was one.
func (m *Monitor) setLevel(c *card, present bool, f Finding, endedWhy string, when time.Time) (ended bool) {
	if !present {
		return m.endCode(c, f.Code, endedWhy)
	}
	m.addLevel(c, f, when)
	return false
}

// applyEvent adds the finding that the event e of the card means, if any, and counts the event.
func (m *Monitor) applyEvent(c *card, e device.HealthEvent, now time.Time) {
	at := notAfter(e.At, now)
	if e.Kind == device.EventRecoveryAction {
		m.applyRecovery(c, e.Recovery, at)
		return
	}
	meaning, code := eventMeaning(e.Kind, c.Recovery != device.RecoveryUnknown), string(e.Kind)
	reason := meaning.Text
	if e.Kind == device.EventXID {
		meaning, code = m.rules.XID(e.XID), "xid-"+strconv.FormatUint(e.XID, 10)
		reason = "XID " + strconv.FormatUint(e.XID, 10) + ": " + meaning.Text
	}
	m.countEvent(c, code, e.Count)
	if meaning.Weight == Ignored {
		return
	}
	state, ends := meaning.stateAndEnd()
	m.addFinding(c, Finding{
		Code: code, XID: e.XID, Part: m.partOf(e), State: state, Ends: ends, Reason: reason, Action: meaning.Action, First: at, Last: at,
	}, e.Count)
}

// partOf returns the part of the card that the event is about. That is the whole card if the
// placement of the event's GPU instance is unknown.
func (m *Monitor) partOf(e device.HealthEvent) Part {
	if e.GPUInstance == nil || e.Place == nil {
		return Part{}
	}
	place := *e.Place
	p := Part{Instance: &place}
	if place.Part {
		p.Compute = e.ComputeInstance
	}
	return p
}
