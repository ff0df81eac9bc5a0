package health

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
)

// Store is the file that keeps a monitor's findings over a restart of the plugin.
type Store struct {
	Disk   durable.FS
	Path   string
	BootID string
}

// format is the format of the file. Raise Version and MinReader together with a change after which
// an older version would misread the findings.
var format = statefile.Format{Kind: "Health", Version: 1, MinReader: 1}

type savedState struct {
	BootID string `json:"bootID"`
	// Driver identifies the last seen load of the kernel driver (see [device.WatcherState]).
	Driver string  `json:"driver,omitempty"`
	Cards  []*card `json:"cards"`
	// Cleared is the text of the last clear request of an admin that the monitor carried out.
	Cleared string `json:"cleared,omitempty"`
}

// Save writes the monitor's findings to the file. Only one process at a time may call it.
func (s Store) Save(m *Monitor) error {
	now := savedState{BootID: s.BootID, Driver: m.driver, Cleared: m.lastClear}
	for _, c := range m.cards {
		now.Cards = append(now.Cards, c)
	}
	slices.SortFunc(now.Cards, func(a, b *card) int { return strings.Compare(string(a.Card.PCIAddress), string(b.Card.PCIAddress)) })
	return format.Write(s.Disk, s.Path, now)
}

// Load adds findings from the file to the monitor. After a boot it adds only what the cards were
// before virtual machines had them. The first call adds all. A later call adds only findings seen
// since the previous call, because older ones may have ended. If the file is unreadable, Load
// renames it and returns an error. If the file needs a later version of the driver, Load returns an
// error, and Save leaves the file untouched.
func (s Store) Load(m *Monitor, now time.Time) error {
	var saved savedState
	found, err := format.Read(s.Disk, s.Path, &saved)
	if err == nil && found {
		if err = saved.validate(); err != nil {
			err = &statefile.UnreadableError{Path: s.Path, Reason: err.Error()}
		}
	}
	var unreadable *statefile.UnreadableError
	if errors.As(err, &unreadable) {
		aside := s.Path + ".unreadable"
		return errors.Join(
			fmt.Errorf("the health file %s is unreadable: moving it to %s and starting without saved findings: %w", s.Path, aside, err),
			s.Disk.Rename(s.Path, aside))
	}
	if err != nil {
		return fmt.Errorf("read the health of this node's GPUs: %w", err)
	}
	if !found {
		return nil
	}
	if m.lastClear == "" {
		m.lastClear = saved.Cleared
	}
	if saved.BootID != s.BootID { // the boot has reset the hardware, and kept what a virtual machine changed
		saved = savedState{Cards: saved.lent()}
	}
	m.merge(saved, now)
	return nil
}

// validate rejects content that Save cannot have written.
func (s savedState) validate() error {
	for _, c := range s.Cards {
		if c == nil {
			return errors.New("a card entry is empty")
		}
		if address, err := device.ParsePCIAddress(string(c.Card.PCIAddress)); err != nil || address != c.Card.PCIAddress {
			return fmt.Errorf("%q is not the PCI address of a card", c.Card.PCIAddress)
		}
		for _, finding := range c.Findings {
			if finding == nil || finding.Code == "" || !slices.Contains([]Ends{EndsByLevel, EndsByReset, EndsByTime}, finding.Ends) {
				return fmt.Errorf("%s has an incomplete finding", c.Card)
			}
		}
	}
	return nil
}

// lent returns the cards that virtual machines had, with nothing else.
func (s savedState) lent() (lent []*card) {
	for _, c := range s.Cards {
		if c.Lent != nil {
			lent = append(lent, &card{Card: c.Card, Lent: c.Lent})
		}
	}
	return lent
}

// merge adds the saved findings to the monitor. XIDs get their state from the current rules,
// because an admin may have changed the rules since. Until the rules are known they keep the saved
// state, so that no rules of another node's configuration drop a finding.
func (m *Monitor) merge(saved savedState, now time.Time) {
	before := m.lastLoad
	m.lastLoad = now
	if m.driver == "" {
		m.driver = saved.Driver
	}
	for _, old := range saved.Cards {
		c := m.cards[old.Card.PCIAddress]
		if c == nil {
			c = m.cardAt(old.Card, now)
		}
		if c.Card.UUID != "" && old.Card.UUID != "" && c.Card.UUID != old.Card.UUID {
			continue // another card is at this address now
		}
		c.Card.UUID = cmp.Or(c.Card.UUID, old.Card.UUID)
		if c.GPU == nil && old.GPU != nil && old.GPU.Card() == c.Card {
			c.GPU = old.GPU
		}
		c.Lent = cmp.Or(c.Lent, old.Lent)
		if c.Recovery == device.RecoveryUnknown {
			c.Recovery, c.ResetRequested = old.Recovery, old.ResetRequested || isReset(old.Recovery)
		}
		c.OtherDriver = c.OtherDriver || old.OtherDriver && before.IsZero()
		if before.IsZero() && !old.Arrived.IsZero() && !old.Arrived.After(now) {
			c.Arrived, c.Validated = old.Arrived, old.Validated
		}
		if c.Uncorrected == nil && c.Energy == nil {
			c.Uncorrected, c.Energy = old.Uncorrected, old.Energy
		}
		for _, f := range old.Findings {
			if before.IsZero() || f.Ends != EndsByLevel && f.Last.After(before) {
				m.restoreFinding(c, *f, now)
			}
		}
	}
	m.version++
}

// applyRules gives a finding about an XID the state that the present rules set. It returns false if
// they ignore the XID.
func (m *Monitor) applyRules(f *Finding) bool {
	if f.XID == 0 || m.rules == nil {
		return true
	}
	meaning := m.rules.XID(f.XID)
	if meaning.Weight == Ignored {
		return false
	}
	state, ends := meaning.stateAndEnd()
	if state != f.State {
		f.Since = f.First
	}
	f.State, f.Ends, f.Action = state, ends, meaning.Action
	return true
}

func (m *Monitor) restoreFinding(c *card, f Finding, now time.Time) {
	clamp(now, &f.First, &f.Last, &f.Since)
	if !m.applyRules(&f) {
		return
	}
	f, ok := c.fit(f)
	if !ok {
		return
	}
	if f.Last.After(c.lastQuery) {
		c.lastQuery = f.Last // resets that later answers prove happened after this finding
	}
	if known := c.find(f.key()); known != nil {
		known.Count = max(known.Count, f.Count)
		if f.First.Before(known.First) {
			known.First = f.First
		}
		if f.Since.Before(known.Since) && f.State == known.State {
			known.Since = f.Since
		}
		if f.Code == manyCode && (f.State > known.State || f.State == known.State && f.Ends == EndsByReset) {
			known.State, known.Ends = f.State, f.Ends
		}
		return
	}
	c.Findings = append(c.Findings, &f)
}
