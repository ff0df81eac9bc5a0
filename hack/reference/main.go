// Reference writes tables of the documentation. Those of docs/reference.md are the flags in
// pkg/config, the values of the chart, the fields of the opaque configuration, and the Events. The
// descriptions of values and fields are comments in values.yaml and in the Go types. The tables of
// docs/support.md say what works on which version. `make reference` runs this program. A test fails
// while a page is out of date.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
)

const (
	page   = "docs/reference.md"
	values = "deployments/helm/gpu-dra-driver/values.yaml"
)

func main() {
	root := flag.String("root", ".", "the repository's root")
	flag.Parse()
	if err := write(*root); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

// pages are the pages with tables, each with the function that returns the page with current ones.
var pages = map[string]func(root string, old []byte) ([]byte, error){page: update, supportPage: updateSupport}

func write(root string) error {
	for page, update := range pages {
		path := root + "/" + page
		old, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		updated, err := update(root, old)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, updated, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// update returns the page old with its tables replaced by current ones.
func update(root string, old []byte) ([]byte, error) {
	chart, err := os.ReadFile(root + "/" + values)
	if err != nil {
		return nil, err
	}
	valueTable, err := chartTable(chart)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", values, err)
	}
	configurations, err := kindTable(root)
	if err != nil {
		return nil, err
	}
	tables := map[string]string{
		"flags": flagTable(), "values": valueTable, "configurations": configurations, "events": eventTable(),
	}
	for name, table := range tables {
		if old, err = replace(old, name, table); err != nil {
			return nil, fmt.Errorf("%s: %w", page, err)
		}
	}
	return old, nil
}

// replace replaces the text between the two comments that enclose the table with this name.
func replace(text []byte, name, table string) ([]byte, error) {
	begin, end := "<!-- begin "+name+" -->\n", "<!-- end "+name+" -->"
	before, rest, found := bytes.Cut(text, []byte(begin))
	_, after, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return nil, fmt.Errorf("the comments %q and %q are missing", strings.TrimSpace(begin), end)
	}
	return bytes.Join([][]byte{before, []byte(begin), []byte(table), []byte(end), after}, nil), nil
}

func flagTable() string {
	var b strings.Builder
	b.WriteString("| flag | environment | key | default | meaning |\n|---|---|---|---|---|\n")
	for _, f := range config.Default().Fields() {
		fmt.Fprintf(&b, "| `--%s` | `%s` | `%s` | %s | %s |\n", f.Name, f.Env(), f.Key(), code(f.Value.String()), cell(f.Usage))
	}
	return b.String()
}

func eventTable() string {
	var b strings.Builder
	b.WriteString("| reason | at | type | meaning | what to do |\n|---|---|---|---|---|\n")
	for _, r := range events.Catalogue() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", r, r.Objects(), r.Severity(), r.Meaning(), r.Action())
	}
	return b.String()
}

func chartTable(source []byte) (string, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(source, &document); err != nil {
		return "", err
	}
	if len(document.Content) != 1 || document.Content[0].Kind != yaml.MappingNode {
		return "", errors.New("the file is not one YAML mapping")
	}
	var b strings.Builder
	b.WriteString("| value | default | meaning |\n|---|---|---|\n")
	err := rows(&b, "", document.Content[0])
	return b.String(), err
}

// rows writes a table row for each value of a YAML mapping, and for each value of the mappings in
// it. A nested mapping with a comment gets a row of its own. prefix is the path of the mapping.
func rows(b *strings.Builder, prefix string, mapping *yaml.Node) error {
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := prefix + key.Value
		meaning := comment(key.HeadComment)
		if value.Kind == yaml.MappingNode && len(value.Content) > 0 {
			if meaning != "" {
				fmt.Fprintf(b, "| `%s` | | %s |\n", name, cell(meaning))
			}
			if err := rows(b, name+".", value); err != nil {
				return err
			}
			continue
		}
		var plain any
		if err := value.Decode(&plain); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		text, err := inline(plain)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", name, code(text), cell(meaning))
	}
	return nil
}

// inline returns a value as YAML in one line, as a user writes it for --set-json.
func inline(value any) (string, error) {
	if value == "" {
		return "", nil
	}
	if list, ok := value.([]any); ok && len(list) == 0 {
		return "[]", nil
	}
	node := &yaml.Node{}
	if err := node.Encode(value); err != nil {
		return "", err
	}
	node.Style = yaml.FlowStyle
	out, err := yaml.Marshal(node)
	return strings.TrimSpace(string(out)), err
}

// comment returns the last paragraph of a value's comment as one line. Earlier paragraphs are
// headings of the values file.
func comment(head string) string {
	paragraphs := strings.Split(head, "\n\n")
	var words []string
	for _, line := range strings.Split(paragraphs[len(paragraphs)-1], "\n") {
		if line = strings.TrimSpace(strings.TrimPrefix(line, "#")); !strings.HasPrefix(line, "---") {
			words = append(words, line)
		}
	}
	return strings.Join(words, " ")
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + cell(s) + "`"
}

func cell(s string) string { return strings.ReplaceAll(s, "|", "\\|") }
