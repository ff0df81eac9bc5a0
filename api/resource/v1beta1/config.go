package v1beta1

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/json"
)

// Config is one opaque configuration: [*GpuConfig], [*MigDeviceConfig] or [*VfioDeviceConfig].
type Config interface {
	// Kind is the configuration's kind, as in its field kind.
	Kind() string
	// Default fills what was left out. Doing it twice is doing it once.
	Default()
	// Validate refuses, in one line that names the field, a configuration that means nothing. It expects a defaulted one.
	Validate() error
}

// kinds makes an empty configuration of each kind, in the order in which errors list them.
var kinds = []func() Config{
	func() Config { return &GpuConfig{} },
	func() Config { return &MigDeviceConfig{} },
	func() Config { return &VfioDeviceConfig{} },
}

// Decode reads a configuration as it stands in a claim, strictly: at most 10 KiB, one JSON object, this package's apiVersion, a known kind,
// known fields only (upper and lower case matter), none twice, nothing after the object. It neither defaults nor validates.
func Decode(raw []byte) (Config, error) {
	if len(raw) > resourceapi.OpaqueParametersMaxLength {
		return nil, fmt.Errorf("opaque configuration of %d bytes is too long: shorten it to at most %d bytes", len(raw), resourceapi.OpaqueParametersMaxLength)
	}
	if !bytes.HasPrefix(bytes.TrimLeft(raw, " \t\r\n"), []byte("{")) {
		return nil, fmt.Errorf("opaque configuration %s is not a JSON object: write an object with apiVersion %s and a kind", quote(string(raw)), APIVersion)
	}

	// The kind decides which fields are known, so it is read first, alone.
	var header struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &header); err != nil {
		return nil, malformed(err, raw, &header)
	}
	if header.APIVersion != APIVersion {
		return nil, fmt.Errorf("opaque configuration has apiVersion %s: set it to %s", quote(header.APIVersion), APIVersion)
	}
	config, err := New(header.Kind)
	if err != nil {
		return nil, err
	}
	unknown, err := json.UnmarshalStrict(raw, config)
	if err != nil {
		return nil, malformed(err, raw, config)
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("%s: %s%s: remove it, or correct its spelling (upper and lower case matter)", header.Kind, brief(unknown[0].Error()), more(len(unknown)-1))
	}
	return config, nil
}

// New is an empty configuration of the kind, not defaulted.
func New(kind string) (Config, error) {
	known := make([]string, 0, len(kinds))
	for _, empty := range kinds {
		config := empty()
		if config.Kind() == kind {
			return config, nil
		}
		known = append(known, config.Kind())
	}
	return nil, fmt.Errorf("opaque configuration has kind %s: use one of %s", quote(kind), strings.Join(known, ", "))
}

// malformed explains an error of the JSON decoder: where in the text it stands, or which field does not take what was written.
func malformed(err error, raw []byte, into any) error {
	text := errors.New(brief(strings.TrimPrefix(err.Error(), "json: ")))
	if syntax, offset := json.SyntaxErrorOffset(err); syntax {
		return fmt.Errorf("opaque configuration is not valid JSON at byte %d: correct it: %w", offset, text)
	}
	if field := locate(raw, into); field != nil {
		text = field
	}
	return fmt.Errorf("opaque configuration has a value of the wrong type: %w", text)
}

func more(n int) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" (and %d more like it)", n)
}

// longest is how much of a user's text an error repeats: errors end in Pod events, which hold 1 KiB.
const longest = 160

// brief is the text as one line, cut to a length that an error can carry.
func brief(text string) string {
	cut := text
	if len(cut) > longest {
		cut = cut[:longest]
		for !utf8.ValidString(cut[len(cut)-1:]) && len(cut) > longest-utf8.UTFMax {
			cut = cut[:len(cut)-1]
		}
		cut += "…"
	}
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, cut)
}

func quote(text string) string { return `"` + brief(text) + `"` }
