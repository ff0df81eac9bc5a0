package health

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Store is the file that keeps a monitor's findings over a restart of the plugin.
type Store struct {
	Disk   durable.FS
	Path   string
	BootID string
}

const formatVersion = 1

type envelope struct {
	FormatVersion int    `json:"formatVersion"`
	Checksum      string `json:"checksum"`
	// Payload is the JSON of a [savedState]. Checksum is the checksum of exactly these bytes.
	Payload json.RawMessage `json:"payload"`
}

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
	payload, err := json.Marshal(now)
	if err != nil {
		return fmt.Errorf("encode the health of this node's GPUs: %w", err)
	}
	raw, err := json.Marshal(envelope{FormatVersion: formatVersion, Checksum: checksum(payload), Payload: payload})
	if err != nil {
		return fmt.Errorf("encode the health of this node's GPUs: %w", err)
	}
	return durable.Replace(s.Disk, s.Path, raw)
}

// Load adds findings from the file to the monitor, unless the node booted since. The first call
// adds all. A later call adds only findings seen since the previous call, because older ones may
// have ended. If the file is unreadable, Load renames it and returns an error.
func (s Store) Load(m *Monitor, now time.Time) error {
	raw, err := s.Disk.ReadFile(s.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var untrusted *durable.UntrustedError
	if err != nil && !errors.As(err, &untrusted) {
		return fmt.Errorf("read the health of this node's GPUs: %w", err)
	}
	var saved savedState
	if err == nil {
		saved, err = decode(raw)
	}
	if err != nil {
		aside := s.Path + ".unreadable"
		return errors.Join(
			fmt.Errorf("the health file %s is unreadable: moving it to %s and starting without saved findings: %w", s.Path, aside, err),
			s.Disk.Rename(s.Path, aside))
	}
	if m.lastClear == "" {
		m.lastClear = saved.Cleared
	}
	if saved.BootID != s.BootID {
		return nil // the boot has reset the hardware
	}
	m.merge(saved, now)
	return nil
}

func checksum(payload []byte) string {
	sum := sha256.Sum256(payload)
	return hex.EncodeToString(sum[:])
}

// decode parses the content of the file, and rejects content that Save cannot have written.
func decode(raw []byte) (savedState, error) {
	var f envelope
	if err := json.Unmarshal(raw, &f); err != nil {
		return savedState{}, err
	}
	if f.FormatVersion > formatVersion {
		return savedState{}, fmt.Errorf("format version %d is from a later version of the driver", f.FormatVersion)
	}
	if f.Checksum != checksum(f.Payload) {
		return savedState{}, errors.New("the checksum does not match")
	}
	var s savedState
	if err := json.Unmarshal(f.Payload, &s); err != nil {
		return savedState{}, err
	}
	if len(s.Cards) > maxCards {
		return savedState{}, fmt.Errorf("%d cards are more than a node can have", len(s.Cards))
	}
	for _, c := range s.Cards {
		if c == nil {
			return savedState{}, errors.New("a card entry is empty")
		}
		if address, err := device.ParsePCIAddress(string(c.Card.PCIAddress)); err != nil || address != c.Card.PCIAddress {
			return savedState{}, fmt.Errorf("%q is not the PCI address of a card", c.Card.PCIAddress)
		}
		for _, finding := range c.Findings {
			if finding == nil || finding.Code == "" || !slices.Contains([]Ends{EndsByLevel, EndsByReset, EndsByTime}, finding.Ends) {
				return savedState{}, fmt.Errorf("%s has an incomplete finding", c.Card)
			}
		}
	}
	return s, nil
}

// merge adds the saved findings to the monitor. XIDs get their state from the current rules,
// because an admin may have changed the rules since.
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
		if c == nil || c.Card.UUID != "" && old.Card.UUID != "" && c.Card.UUID != old.Card.UUID {
			continue // the monitor is full, or another card is at this address now
		}
		c.Card.UUID = cmp.Or(c.Card.UUID, old.Card.UUID)
		if c.GPU == nil && old.GPU != nil && old.GPU.Card() == c.Card {
			c.GPU = old.GPU
		}
		if c.Recovery == device.RecoveryUnknown {
			c.Recovery, c.ResetRequested = old.Recovery, old.ResetRequested || isReset(old.Recovery)
		}
		c.OtherDriver = c.OtherDriver || old.OtherDriver && before.IsZero()
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

func (m *Monitor) restoreFinding(c *card, f Finding, now time.Time) {
	for _, at := range []*time.Time{&f.First, &f.Last, &f.Since} {
		if at.After(now) {
			*at = now
		}
	}
	if f.XID != 0 {
		meaning := m.rules.XID(f.XID)
		if meaning.Weight == Ignored {
			return
		}
		state, ends := meaning.stateAndEnd()
		if state != f.State {
			f.Since = f.First
		}
		f.State, f.Ends, f.Action = state, ends, meaning.Action
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
		return
	}
	if m.ensureRoom(c, &f, now) {
		c.Findings = append(c.Findings, &f)
	}
}
