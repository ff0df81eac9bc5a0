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

// Config is one opaque configuration of a claim or DeviceClass: a [*GpuConfig], a
// [*MigDeviceConfig] or a [*VfioDeviceConfig].
type Config interface {
	// Kind returns the value of the configuration's field kind.
	Kind() string
	// Default fills in missing values. A second call changes nothing.
	Default()
	// Validate returns an error of one line that names the invalid field. Call Default first.
	Validate() error
	// SharingStrategy returns the requested strategy, or [SharingNone].
	SharingStrategy() SharingStrategy
}

// kinds has a function for each kind that returns an empty configuration. Errors list the kinds in
// this order.
var kinds = []func() Config{
	func() Config { return &GpuConfig{} },
	func() Config { return &MigDeviceConfig{} },
	func() Config { return &VfioDeviceConfig{} },
}

// Decode reads an opaque configuration strictly. It accepts one JSON object of at most 10 KiB with
// nothing after it. The object must have this package's apiVersion and a known kind. Its fields
// must be known (upper and lower case matter) and occur once. Decode neither fills in missing
// values nor validates.
func Decode(raw []byte) (Config, error) {
	if len(raw) > resourceapi.OpaqueParametersMaxLength {
		return nil, fmt.Errorf("opaque configuration of %d bytes is too long: shorten it to at most %d bytes", len(raw),
			resourceapi.OpaqueParametersMaxLength)
	}
	if !bytes.HasPrefix(bytes.TrimLeft(raw, " \t\r\n"), []byte("{")) {
		return nil, fmt.Errorf("opaque configuration %s is not a JSON object: write an object with apiVersion %s and a kind",
			quote(string(raw)), APIVersion)
	}

	// Read the kind first, because it determines the known fields.
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
		return nil, fmt.Errorf("%s: %s%s: remove it, or correct its spelling (upper and lower case matter)", header.Kind,
			brief(unknown[0].Error()), more(len(unknown)-1))
	}
	return config, nil
}

// New returns an empty configuration of this kind, without default values.
func New(kind string) (Config, error) {
	for _, empty := range kinds {
		if config := empty(); config.Kind() == kind {
			return config, nil
		}
	}
	return nil, fmt.Errorf("opaque configuration has kind %s: use one of %s", quote(kind), strings.Join(Kinds(), ", "))
}

// Kinds returns the names of all kinds.
func Kinds() []string {
	names := make([]string, 0, len(kinds))
	for _, empty := range kinds {
		names = append(names, empty().Kind())
	}
	return names
}

// malformed explains an error of the JSON decoder. It names the position of a syntax error, or the
// field whose value has the wrong type. into is the configuration that the decoder wrote to.
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

// longest is how many bytes of the user's text an error quotes at most. It is small because errors
// go into Events, whose message has at most 1 KiB.
const longest = 160

// brief returns the text in one line of at most longest bytes, for an error.
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
