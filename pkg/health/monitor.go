package health

import (
	"cmp"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

const (
	// maxChanges bounds the changes that no caller of Changes has read yet. Beyond this limit further
	// changes are dropped, because the first ones of a burst name its cause.
	maxChanges = 256
	// maxEventKeys bounds the number of event counters. Events of further kinds are added to one
	// counter with the name "other".
	maxEventKeys = 1024
)

// Monitor derives verdicts from signals. Only one goroutine may use it. Readers use a [View].
type Monitor struct {
	rules Rules // nil until they are known
	cards map[device.PCIAddress]*card
	// forgotten has the PCI addresses of removed cards. If the watcher process still reports such a
	// card as lost, the monitor ignores the report.
	forgotten map[device.PCIAddress]bool
	// driver identifies the last seen load of the kernel driver (see [device.WatcherState]).
	driver string
	// lastClear is the text of the last clear request of an admin that the monitor carried out.
	lastClear string
	// lent has the cards that claims have for virtual machines, so that NVML cannot query them.
	lent map[device.PCIAddress]bool
	// checks has the checks of Validate. It is nil before the first call.
	checks map[string]time.Time
	// silentSince is when the watcher process stopped, and silenceReason says why. Both are zero while
	// the watcher process runs.
	silentSince   time.Time
	silenceReason string
	released      bool
	// eventFailure explains why the watcher process receives no NVML events. It is empty while events
	// can arrive.
	eventFailure string

	now time.Time // the time of the last call
	// lastLoad is when Store.Load last added saved findings.
	lastLoad time.Time
	version  uint64
	changes  []Change
	counts   map[EventKey]uint64
}

// EventKey identifies an event counter, which counts the events with one code on one card.
type EventKey struct {
	Card device.PCIAddress
	Code string
}

// New returns a monitor that waits for signals from now on. A card is Healthy until a signal
// reports a fault, and becomes Unknown if no signal arrives for a while. rules are an admin's, or
// nil until SetRules.
func New(rules Rules, now time.Time) *Monitor {
	return &Monitor{
		rules: rules, cards: map[device.PCIAddress]*card{}, forgotten: map[device.PCIAddress]bool{}, counts: map[EventKey]uint64{},
		silentSince: now, silenceReason: "the watcher has not started", now: now,
	}
}

// SetRules replaces the admin's rules. XIDs that the monitor already knows get their new states.
func (m *Monitor) SetRules(rules Rules) {
	m.rules = rules
	for _, c := range m.cards {
		m.endFindings(c, func(f *Finding) bool { return !m.applyRules(f) }, "a new rule ignores this XID")
	}
	m.version++
}

// Expect tells the monitor which cards the inventory found. A card that is new to the monitor
// becomes Unknown if it does not answer within the usual time from now on.
func (m *Monitor) Expect(gpus []device.GPU, now time.Time) {
	m.now = now
	for _, g := range gpus {
		c := m.cardAt(g.Card(), now)
		c.GPU = &g // changes no verdict
		m.compareLent(c, g, now)
	}
}

// Lend tells the monitor which cards claims have for virtual machines. Such a card is as healthy as
// it was, whatever the watcher process says about it, because NVML cannot query it.
func (m *Monitor) Lend(lent map[device.PCIAddress]bool, now time.Time) {
	m.now = now
	for address, c := range m.cards {
		switch {
		case lent[address] && !c.OtherDriver:
			m.leave(c)
		case m.lent[address] && !lent[address]:
			c.lastHeard = now // it must answer within the usual time from now on
		}
	}
	m.lent = lent
}

// leave notes that another kernel driver has the card.
func (m *Monitor) leave(c *card) {
	if !c.OtherDriver {
		c.OtherDriver = true
		m.version++
	}
	c.failingSince, c.fabricMissingSince = time.Time{}, time.Time{}
	m.endFindings(c, func(f *Finding) bool { return f.Ends == EndsByLevel }, "another kernel driver is bound to the GPU")
}

// Forget removes the card at this address from the monitor. After that, a report that the card is
// lost does not add the card again. A good answer or an event of a card at this address does.
func (m *Monitor) Forget(address device.PCIAddress) {
	if _, known := m.cards[address]; known {
		delete(m.cards, address)
		m.forgotten[address] = true
		m.version++
	}
}

// Apply updates the findings from one signal.
func (m *Monitor) Apply(s device.Signal, now time.Time) {
	m.now = now
	switch {
	case s.Event != nil:
		m.applyEvent(m.cardAt(s.Event.Card, now), *s.Event, now)
	case s.Condition != nil:
		a, reach := s.Condition.Card.PCIAddress, s.Condition.Reach
		if m.cards[a] == nil && (reach == device.ReachNotOurs || reach != device.ReachOK && m.forgotten[a]) {
			return
		}
		if c := m.cardAt(s.Condition.Card, now); !m.lent[a] {
			m.applyCondition(c, *s.Condition, now)
		}
	case s.Watcher != nil:
		m.applyWatcher(*s.Watcher, now)
	}
}

// Tick ends findings that have not recurred for the quiet period, and adds findings about cards
// that were silent for too long. The caller must call it about every second.
func (m *Monitor) Tick(now time.Time) {
	m.now = now
	for _, c := range m.cards {
		m.checkTimeouts(c, now)
	}
}

// cardAt returns the card with this PCI address and UUID, and adds it if it is new. It first
// removes a card with another UUID at the address.
func (m *Monitor) cardAt(id device.Card, now time.Time) *card {
	c := m.cards[id.PCIAddress]
	var lent *device.GPU
	if c != nil && id.UUID != "" && c.Card.UUID != "" && c.Card.UUID != id.UUID {
		m.endFindings(c, func(*Finding) bool { return true }, "another card is at this address: "+id.UUID)
		delete(m.cards, id.PCIAddress)
		m.version++
		c, lent = nil, c.Lent
	}
	if c == nil {
		c = &card{Card: id, Lent: lent, lastHeard: now, Arrived: now}
		m.cards[id.PCIAddress] = c
		delete(m.forgotten, id.PCIAddress)
		m.version++
	}
	if c.Card.UUID == "" {
		c.Card.UUID = id.UUID
	}
	m.validate(c)
	return c
}

// applyWatcher updates the monitor from a report of the watcher process about itself.
func (m *Monitor) applyWatcher(s device.WatcherState, now time.Time) {
	at := notAfter(s.At, now)
	if s.Driver != "" && s.Driver != m.driver {
		if m.driver != "" {
			for _, c := range m.cards {
				c.Uncorrected, c.Energy = nil, nil
				c.Recovery = device.RecoveryUnknown
				m.endByReset(c, at, "the driver was loaded again")
			}
		}
		m.driver = s.Driver
		m.version++
	}
	m.eventFailure = ""
	if !s.Events {
		m.eventFailure = cmp.Or(oneLine(s.Error), "unknown")
	}
	if m.released != s.Released {
		m.released = s.Released
		m.version++
	}
	switch {
	case s.Up:
		if !m.silentSince.IsZero() {
			for _, c := range m.cards {
				c.lastHeard = now
			}
		}
		m.silentSince, m.silenceReason = time.Time{}, ""
	case m.silentSince.IsZero():
		m.silentSince, m.silenceReason = now, cmp.Or(oneLine(s.Error), "unknown")
	default:
		m.silenceReason = cmp.Or(oneLine(s.Error), m.silenceReason)
	}
	m.Tick(now)
}

// EventFailure explains why the watcher process receives no NVML events. It returns "" while events
// can arrive.
func (m *Monitor) EventFailure() string { return m.eventFailure }

// Version returns a number that changes whenever a verdict may have changed. It stays the same if
// only counts or times of findings changed.
func (m *Monitor) Version() uint64 { return m.version }

// recordChange queues a change for [Monitor.Changes].
func (m *Monitor) recordChange(change Change) {
	m.version++
	if len(m.changes) < maxChanges {
		m.changes = append(m.changes, change)
	}
}

// Changes returns the findings that started, changed or ended since the last call of Changes,
// oldest first.
func (m *Monitor) Changes() []Change {
	taken := m.changes
	m.changes = nil
	return taken
}

// countEvent adds n events of the card, at least one, to the counter for the code.
func (m *Monitor) countEvent(c *card, code string, n int) {
	key := EventKey{c.Card.PCIAddress, code}
	if _, known := m.counts[key]; !known && len(m.counts) >= maxEventKeys {
		key.Code = "other"
	}
	m.counts[key] += uint64(max(n, 1))
}

// Counts returns how many events of each kind each card had since the last call of Counts.
func (m *Monitor) Counts() map[EventKey]uint64 {
	taken := m.counts
	m.counts = map[EventKey]uint64{}
	return taken
}
