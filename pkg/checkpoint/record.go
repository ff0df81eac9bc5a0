package checkpoint

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// State says how far a claim's preparation has come.
type State string

const (
	// Preparing means that any part of the steps may have been applied: all of them have to be reverted.
	Preparing State = "Preparing"
	// Prepared means that every step was applied and the kubelet may have been told.
	Prepared State = "Prepared"
	// Reverting means that the claim is being given back and any part of it may be gone. To a version that does not know the word it is, like all that is
	// not Prepared, something to revert.
	Reverting State = "Reverting"
)

// Record is what the driver must know of a claim after anything has happened to the node.
type Record struct {
	ClaimUID  types.UID `json:"claimUID"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	State     State     `json:"state"`
	// BootID is the kernel's of when the steps were applied: a reboot makes the hardware and tmpfs forget.
	BootID  string   `json:"bootID"`
	Devices []Device `json:"devices"`
	// Steps in the order in which they are applied; reverted backwards.
	Steps []Step `json:"steps"`

	unknown map[string]json.RawMessage
}

// Device is one allocation result of the claim.
type Device struct {
	Request     string     `json:"request"`
	Pool        string     `json:"pool"`
	Device      string     `json:"device"`
	ShareID     *types.UID `json:"shareID,omitempty"`
	AdminAccess bool       `json:"adminAccess,omitempty"`
	// GPU is the name of the physical card, GPUUUID which card that was: another UUID under the same name is another card.
	GPU     string `json:"gpu"`
	GPUUUID string `json:"gpuUUID"`
	// MIGUUID is which MIG device it was, for a partition that exists.
	MIGUUID string `json:"migUUID,omitempty"`
	// Fraction says that it is a share with limits, and not one of those that only take turns.
	Fraction bool `json:"fraction,omitempty"`
	// ConsumedCapacity is what the share takes of each of its device's capacities. Records of earlier
	// versions do not have it, nor do devices that are held alone.
	ConsumedCapacity map[string]resource.Quantity `json:"consumedCapacity,omitempty"`

	unknown map[string]json.RawMessage
}

// Step is a step of package prepare in its stored form.
type Step struct {
	Kind string `json:"kind"`
	// Params are kept by who knows the kind.
	Params json.RawMessage `json:"params"`

	unknown map[string]json.RawMessage
}

// Holds names the devices that the claim holds for itself, without duplicates, in the devices' order. Admin access holds nothing.
func (r Record) Holds() []string {
	return r.held(func(d Device) string { return d.Device })
}

// GPUs names the physical cards of what the claim holds for itself, in the same way.
func (r Record) GPUs() []string {
	return r.held(func(d Device) string { return d.GPU })
}

func (r Record) held(name func(Device) string) []string {
	var names []string
	seen := map[string]bool{}
	for _, d := range r.Devices {
		if n := name(d); !d.AdminAccess && !seen[n] {
			seen[n] = true
			names = append(names, n)
		}
	}
	return names
}

// Fields that this version does not know were written by a later one, which may read the record again: they are kept.

type plainRecord Record

var recordFields = fieldsOf[plainRecord]()

func (r *Record) UnmarshalJSON(raw []byte) error {
	unknown, err := decodeKnown(raw, (*plainRecord)(r), recordFields)
	r.unknown = unknown
	return err
}

func (r Record) MarshalJSON() ([]byte, error) { return encodeWith(plainRecord(r), r.unknown) }

type plainDevice Device

var deviceFields = fieldsOf[plainDevice]()

func (d *Device) UnmarshalJSON(raw []byte) error {
	unknown, err := decodeKnown(raw, (*plainDevice)(d), deviceFields)
	d.unknown = unknown
	return err
}

func (d Device) MarshalJSON() ([]byte, error) { return encodeWith(plainDevice(d), d.unknown) }

type plainStep Step

var stepFields = fieldsOf[plainStep]()

func (s *Step) UnmarshalJSON(raw []byte) error {
	unknown, err := decodeKnown(raw, (*plainStep)(s), stepFields)
	s.unknown = unknown
	return err
}

func (s Step) MarshalJSON() ([]byte, error) { return encodeWith(plainStep(s), s.unknown) }

// decodeKnown fills v, which has these fields, and returns those of the object that it does not have.
func decodeKnown(raw []byte, v any, fields []string) (map[string]json.RawMessage, error) {
	if err := json.Unmarshal(raw, v); err != nil {
		return nil, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, err
	}
	for _, name := range fields {
		delete(all, name)
	}
	if len(all) == 0 {
		return nil, nil
	}
	return all, nil
}

// fieldsOf are the names of a struct's fields in JSON.
func fieldsOf[T any]() []string {
	var names []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[T]()) {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" {
			names = append(names, name)
		}
	}
	return names
}

func encodeWith(v any, unknown map[string]json.RawMessage) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil || len(unknown) == 0 {
		return raw, err
	}
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fmt.Errorf("keep the fields of a later version: %w", err)
	}
	for name, value := range unknown {
		if _, ours := all[name]; !ours {
			all[name] = value
		}
	}
	return json.Marshal(all)
}
