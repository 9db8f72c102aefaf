"""Chat templates with the shapes of ten public ones, in our own words and marks

Each ends its blocks so that the lines of this file leave no white space in a prompt."""

PLAIN = """
{%- for m in messages %}
{%- if m['role'] == 'system' and m['content'] %}
{{- '<|user|>system\\n' + m['content'] + '</s>\\n' }}
{%- elif m['role'] == 'user' %}{{- '<|user|>\\n' + m['content'] + '</s>\\n' }}
{%- elif m['role'] == 'assistant' %}{{- '<|bot|>\\n' + m['content'] + '</s>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

DEFAULT_SYSTEM = """
{%- if tools %}{{- '<|user|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '</s>\\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|user|>system\\nYou are a model.</s>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if tools and loop.first and m.role == 'system' %}
{%- elif m.role in ('user', 'system') or m.role == 'assistant' and not m.tool_calls %}
{{- '<|user|>' + m.role + '\\n' + m.content + '</s>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|user|>' + m.role }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}</tool_call>' }}{%- endfor %}{{- '</s>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|user|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '</s>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>assistant\\n' }}{%- endif %}"""

FORGETS_THOUGHTS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|bot|>' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- content }}
{%- for call in m.tool_calls or [] %}{%- set said = call.function.arguments %}
{{- '[' + call.function.name + ' ' }}{{- said if said is string else said | tojson }}{{- ']' }}
{%- endfor %}{{- '</s>' }}
{%- else %}{{- '<|user|>' + m.role + ':' + content + '</s>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

DATED = """
{{- bos_token }}
{%- if strftime_now is defined %}{%- set date = strftime_now('%Y') | length %}
{%- else %}{%- set date = 'then' %}{%- endif %}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|user|>system\\n\\nToday: ' }}{{- date }}{{- '\\n' + system + '</s>' }}
{%- if tools is not none and tools %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<|user|>user\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- first + '</s>' }}{%- endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set c = m.tool_calls[0].function %}
{{- '<|bot|>assistant\\n\\n{"name": "' + c.name + '", "parameters": ' }}
{{- c.arguments | tojson }}{{- '}</s>' }}
{%- elif m.role == 'tool' %}{{- '<|user|>ipython\\n\\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}
{%- else %}{{- m.content }}{%- endif %}{{- '</s>' }}
{%- else %}{{- '<|user|>' + m['role'] + '\\n\\n' + m['content'] | trim + '</s>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>assistant\\n\\n' }}{%- endif %}"""

SYSTEM_LAST = """
{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
{%- if m['role'] == 'user' %}
{%- if tools is not none and tools and m == users[-1] %}
{{- '[AVAILABLE]' }}{{- tools | tojson }}{{- '[/AVAILABLE]' }}{%- endif %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m['content'] }}
{%- else %}{{- '[INST] ' + m['content'] }}{%- endif %}{{- '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[CALLS]' }}
{%- for c in m.tool_calls %}{{- c.function.name }}{{- c.function.arguments | tojson }}{{- c.id }}
{%- endfor %}{{- eos_token }}
{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
{%- elif m['role'] == 'tool' %}{{- '[RESULT]' + m.content | string + '[/RESULT]' }}
{%- else %}{{- raise_exception('unknown role') }}{%- endif %}{%- endfor %}"""

TEXT_OR_PARTS = """
{{- bos_token }}
{%- set first, turns = '', messages %}
{%- if messages[0]['role'] == 'system' %}{%- set turns = messages[1:] %}
{%- if messages[0]['content'] is string %}{%- set first = messages[0]['content'] + '\\n\\n' %}
{%- else %}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' %}{%- endif %}{%- endif %}
{%- for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<|user|>' + role + '\\n' + (first if loop.first else '') }}
{%- if m['content'] is string %}{{- m['content'] | trim }}
{%- elif m['content'] is iterable %}{%- for item in m['content'] %}
{%- if item['type'] == 'image' %}{{- '<image>' }}
{%- elif item['type'] == 'text' %}{{- item['text'] | trim }}{%- endif %}{%- endfor %}
{%- else %}{{- raise_exception('no content') }}{%- endif %}{{- '</s>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>model\\n' }}{%- endif %}"""

THINKS_FIRST = """
{%- if add_generation_prompt is not defined %}{%- set add_generation_prompt = false %}{%- endif %}
{%- set ns = namespace(system='') %}
{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + m['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '<|user|>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for c in m['tool_calls'] %}{{- '<|bot|>' + c['function']['name'] + ' ' }}
{{- c['function']['arguments'] + '</s>' }}{%- endfor %}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{{- '<|bot|>' + m['content'].split('</think>')[-1] + '</s>' }}{%- endif %}
{%- if m['role'] == 'tool' %}{{- '<out>' + m['content'] + '</out>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|><think>\\n' }}{%- endif %}"""

PARTS_ALONE = """
{%- for m in messages %}{{- m['role'] | capitalize }}
{%- if m['content'][0]['type'] == 'image' %}{{- ':' }}{%- else %}{{- ': ' }}{%- endif %}
{%- for line in m['content'] %}
{%- if line['type'] == 'text' %}{{- line['text'] }}
{%- elif line['type'] == 'image' %}{{- '<image>' }}{%- endif %}{%- endfor %}{{- '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""

ARGUMENTS_IN_TURN = """
{{- '<s>[x]' }}
{%- macro seen(content) %}
{%- if content is string %}{{- content }}
{%- elif content is iterable and content is not mapping %}{%- for item in content %}
{%- if item is mapping and item.type == 'text' %}{{- item.text }}
{%- elif item is string %}{{- item }}{%- endif %}{%- endfor %}
{%- else %}{{- content }}{%- endif %}{%- endmacro %}
{%- if tools %}{{- '<|user|>system\\n' }}
{%- for t in tools %}{{- t | tojson(ensure_ascii=False) }}{{- '\\n' }}{%- endfor %}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' }}{{- seen(m.content) }}
{%- if enable_thinking is defined and not enable_thinking
and not seen(m.content).endswith('/nothink') %}{{- '/nothink' }}{%- endif %}
{%- elif m.role == 'assistant' %}{{- '<|bot|>' }}
{%- if m.content %}{{- '\\n' + seen(m.content).strip() }}{%- endif %}
{%- for c in m.tool_calls or [] %}{%- if c.function %}{%- set c = c.function %}{%- endif %}
{{- '\\n<call>' + c.name }}
{%- for k, v in c.arguments.items() %}{{- '\\n<k>' + k + '</k><v>' }}
{{- v if v is string else v | tojson(ensure_ascii=False) }}{{- '</v>' }}{%- endfor %}
{{- '</call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|user|>observation\\n' }}{{- seen(m.content) }}
{%- elif m.role == 'system' %}{{- '<|user|>system\\n' }}{{- seen(m.content) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}
{%- endif %}"""

MARKS_WHAT_TRAINS = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|bot|>' }}
{%- generation %}{{- m.content }}{{- eos_token }}{%- endgeneration %}
{%- else %}{{- '<|user|>' + m.role }}{{- ': ' }}{{- m.content }}{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if documents %}{{- 'documents' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}{%- endif %}"""

SHAPES = dict(  # name -> template, which rows of the test of prompts it is made for
    plain=(PLAIN, ''),
    default_system=(DEFAULT_SYSTEM, 'tools calls'),
    forgets_thoughts=(FORGETS_THOUGHTS, 'thinking calls'),
    dated=(DATED, 'tools one_call'),
    system_last=(SYSTEM_LAST, 'tools calls'),
    text_or_parts=(TEXT_OR_PARTS, 'alternate'),
    thinks_first=(THINKS_FIRST, 'calls'),
    parts_alone=(PARTS_ALONE, ''),
    arguments_in_turn=(ARGUMENTS_IN_TURN, 'tools thinking calls'),
    marks_what_trains=(MARKS_WHAT_TRAINS, 'calls'),
)
